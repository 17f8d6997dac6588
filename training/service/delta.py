"""The gated delta rule over the texts of a micro-batch, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from engine.architectures.parts.delta import DeltaNet
from engine.attention.base import BatchLayout
from engine.attention.delta import (
    DeltaBackend,
    DeltaInputs,
    DeltaVectors,
    gated_norm,
    ruled_inputs,
    whole_sequence,
)


class TrainedDelta(DeltaBackend):
    """Each text begins with a state of zeros, and nothing before it; keeps no states."""

    def __init__(self, spec: DeltaNet) -> None:
        self._spec = spec
        self._texts: Sequence[slice] = ()

    def plan(self, batch: BatchLayout) -> None:
        self._texts = [slice(start, end) for start, end in pairwise(batch.row_starts)]

    def mix(self, layer: int, given: DeltaInputs, vectors: DeltaVectors) -> torch.Tensor:
        ruled, z = ruled_inputs(given, vectors, self._spec)
        out = torch.cat([whole_sequence(ruled.cut(text), vectors.conv, self._spec) for text in self._texts])
        return gated_norm(out, z, vectors).to(given.wide[0].dtype)
