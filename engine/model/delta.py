"""A gated delta net of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.delta import DeltaBackend, DeltaInputs, DeltaVectors
from engine.linear.base import Linear
from engine.model.attention import Attention
from engine.model.step import StepInput
from engine.ops.base import Ops


@dataclass
class DeltaNetAttention(Attention):
    """`wide` are the projections to q, k, v, z and `gates` those to b, a, as `DeltaNet` says."""

    layer: int
    wide: list[Linear]
    gates: list[Linear]
    out: Linear
    vectors: DeltaVectors
    backend: DeltaBackend

    def output(self, ops: Ops, x: torch.Tensor, step: StepInput) -> torch.Tensor:
        wide = [linear(x, step.lora) for linear in self.wide]
        gates = [linear(x.float(), step.lora) for linear in self.gates]
        return self.out(self.backend.mix(self.layer, DeltaInputs(wide, gates), self.vectors), step.lora)
