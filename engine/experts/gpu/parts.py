"""What computes CPU experts' layers on a GPU: the kernels, the weights' source, biases, the adapters. One set serves
the hybrid backend and streamed prefill around it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine.architectures.config import ModelConfig
from engine.experts.capabilities import PackedWeights
from engine.experts.gpu.adapters import HostAdapters
from engine.experts.gpu.compute import GpuCompute
from engine.experts.gpu.layout import Elementwise, Sizes
from engine.experts.gpu.source import PackedLayer, PackedSource
from engine.weights.store import ExpertStore


@dataclass(frozen=True)
class GpuParts:
    """Made for steps of up to `max_rows` rows with adapters in slots 1 ... max_slots."""

    sizes: Sizes
    compute: GpuCompute
    source: PackedSource
    adapters: HostAdapters
    elementwise: dict[int, Elementwise] = field(default_factory=dict)  # by layer

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

    def load(self, layer: int, store: ExpertStore) -> PackedLayer:
        """A layer that the CPU backend has loaded of this store."""
        if layer not in self.elementwise:
            self.elementwise[layer] = Elementwise.of(store, self.sizes, self.compute.device)
        return self.source.add(layer)

    def close(self) -> None:
        """No step may be in flight."""
        self.elementwise.clear()
        self.source.close()
