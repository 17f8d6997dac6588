"""A gated delta net of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.architectures.parts.delta import DeltaNet
from engine.attention.delta import DeltaInputs, ReferenceDeltaNet
from engine.linear.base import Linear
from engine.model.attention import Attention
from engine.model.step import StepInput
from engine.ops.base import Ops


@dataclass
class DeltaNetAttention(Attention):
    """`wide` are the projections to q, k, v, z and `gates` those to b, a, as `spec.fused` says. float32: `conv`
    [channels, kernel], `decay` (-exp(A_log)) and `dt_bias` [heads], `norm` [value_dim]."""

    spec: DeltaNet
    layer: int
    wide: list[Linear]
    gates: list[Linear]
    out: Linear
    conv: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    norm_eps: float
    backend: ReferenceDeltaNet

    def output(self, ops: Ops, x: torch.Tensor, step: StepInput) -> torch.Tensor:
        spec = self.spec
        wide = [linear(x, step.lora).float() for linear in self.wide]
        narrow = [linear(x.float(), step.lora) for linear in self.gates]
        if spec.fused:
            (qkv, z), (b, a) = self._wide(wide[0]), self._gates(narrow[0])
        else:
            (qkv, z), (b, a) = wide, narrow
        given = DeltaInputs(qkv, self.decay * F.softplus(a + self.dt_bias), torch.sigmoid(b))
        mixed = self.backend.mix(self.layer, given, self.conv)
        normed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + self.norm_eps) * self.norm
        return self.out((normed.flatten(1) * F.silu(z)).to(x.dtype), step.lora)

    def _wide(self, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, key_heads x (q, k, v, z of the head)] -> [q | k | v], z."""
        spec = self.spec
        values = spec.value_width // spec.key_heads
        heads = fused.view(len(fused), spec.key_heads, -1)
        q, k, v, z = (part.flatten(1) for part in torch.split(heads, [spec.key_dim, spec.key_dim, values, values], -1))
        return torch.cat((q, k, v), dim=-1), z

    def _gates(self, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, key_heads x (b, a of its value heads)] -> b, a [T, value_heads]."""
        b, a = fused.view(len(fused), self.spec.key_heads, -1).chunk(2, dim=-1)
        return b.flatten(1), a.flatten(1)
