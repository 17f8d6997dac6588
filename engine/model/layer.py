"""A layer of a decoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.model.attention import Attention
from engine.model.mlp import Mlp
from engine.model.step import StepInput
from engine.ops.base import Ops
from engine.ranks.group import ALONE, Group


@dataclass
class Layer:
    """residual += attention(norm(residual)); residual += mlp(norm(residual))."""

    index: int
    input_norm: torch.Tensor
    attention: Attention
    post_norm: torch.Tensor
    mlp: Mlp

    def forward(
        self, ops: Ops, residual: torch.Tensor, delta: torch.Tensor | None, step: StepInput, group: Group = ALONE
    ) -> torch.Tensor:
        """Adds `delta` [T, H], of the layer before, and the attention's output to residual [T, H] in place; returns
        what the MLP adds [T, H]."""
        x = ops.add_rms_norm(residual, delta, self.input_norm)
        delta = group.sum(self.attention.output(ops, x, step))
        if step.observe:
            step.observe(f"model.layers.{self.index}.self_attn", delta)
        x = self.mlp.enter(ops, self.post_norm, residual, delta, step)
        delta = group.sum(self.mlp.output(ops, x, step.lora, step.trace))
        if step.observe:
            step.observe(f"model.layers.{self.index}.mlp", delta)
        return delta
