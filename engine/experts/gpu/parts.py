"""What computes CPU experts' layers on a GPU: the kernels, the weights' source, the adapters. One set serves the hybrid
backend and streamed prefill around it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.architectures.config import ModelConfig
from engine.experts.capabilities import PackedWeights
from engine.experts.gpu.adapters import HostAdapters
from engine.experts.gpu.compute import GpuCompute
from engine.experts.gpu.layout import Sizes
from engine.experts.gpu.source import PackedSource


@dataclass(frozen=True)
class GpuParts:
    """Made for steps of up to `max_rows` rows with adapters in slots 1 ... max_slots."""

    sizes: Sizes
    compute: GpuCompute
    source: PackedSource
    adapters: HostAdapters

    @classmethod
    def make(
        cls,
        config: ModelConfig,
        packed: PackedWeights,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_rows: int,
        max_slots: int,
        max_rank: int,
    ) -> GpuParts:
        sizes, pin = Sizes.of(config), device.type == "cuda"
        return cls(
            sizes,
            GpuCompute(sizes, dtype, device, max_rows=max_rows, max_rank=max_rank, max_slots=max_slots),
            PackedSource(packed, sizes, device),
            HostAdapters(sizes, dtype, max_slots=max_slots, max_rank=max_rank, pin=pin),
        )
