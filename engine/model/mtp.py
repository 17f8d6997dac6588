"""A layer of multi-token prediction: from a position's hidden state and the token after it to a guess at the one after
that."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.linear.base import Linear
from engine.model.layer import Layer
from engine.model.step import StepInput
from engine.ops.base import Ops


@dataclass
class MtpLayer:
    """norm(layer(eh_proj([enorm(embedding of the next token) | hnorm(hidden state)]))), without adapters. The layer's
    cache is in the blocks of the model's own."""

    embedding_norm: torch.Tensor  # [H]
    hidden_norm: torch.Tensor  # [H]
    projection: Linear  # [H, 2 H]
    layer: Layer
    norm: torch.Tensor  # [H]

    def forward(self, ops: Ops, embedded: torch.Tensor, hidden: torch.Tensor, step: StepInput) -> torch.Tensor:
        """`embedded` [T, H]: of each position's next token; `hidden` [T, H]: the model's after its final norm, or what
        this returned for the position before. Returns [T, H]: what the head makes logits of for the token after the
        next one. The layer's attention has planned the step."""
        residual = self._projected(ops, embedded, hidden)
        delta = self.layer.forward(ops, residual, None, step)
        return ops.add_rms_norm(residual, delta, self.norm)

    def _projected(self, ops: Ops, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        parts = ops.add_rms_norm(embedded, None, self.embedding_norm), ops.add_rms_norm(hidden, None, self.hidden_norm)
        return self.projection(torch.cat(parts, dim=-1), None)
