"""Routed experts on a GPU that holds them all, with many adapters in one batch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from engine.architectures.config import ModelConfig
from engine.errors import AdapterError, ExpertBackendError
from engine.experts.base import ExpertBackend, ExpertBuffers, ExpertTask
from engine.experts.capabilities import ExpertPlaces, TouchedExperts
from engine.experts.gpu.compute import GpuCompute, LayerTables, SlotTables
from engine.experts.gpu.layout import PROJECTIONS, Elementwise, ExpertLayout, Sizes, expert_layout, lora_blocks
from engine.experts.stream import on_stream
from engine.lora.adapter import ExpertLora, padded_rank
from engine.weights.store import ExpertStore
from engine.weights.tiled.packer import Packer


class GpuExperts(ExpertBackend):
    """Weights as the file has them where the GPU has a form for it, otherwise in the activations' type; `quantise`
    ("int8", "int4") makes those that the file does not quantise smaller. Everything that changes between steps is read
    from device tables, so that a captured post serves any rows and adapters. `max_slots`, `max_rank`: of adapters;
    `max_rows`: of any buffers."""

    buffers_on = "cuda"
    follows_stream = True

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_rows: int,
        max_slots: int,
        max_rank: int,
        quantise: str | None = None,
        pack: Packer | None = None,
    ) -> None:
        self._sizes = Sizes.of(config)
        self._dtype = dtype
        self._device = device
        self._quantise = quantise
        self._pack = pack or Packer(device)
        self._numbers = {layer: number for number, layer in enumerate(config.sparse_layers)}
        self._compute = GpuCompute(
            self._sizes, dtype, device, max_rows=max_rows, max_rank=max_rank, max_slots=max_slots
        )
        self._slots = SlotTables.allocate(len(self._numbers), max_slots + 1, device)
        self._touched = TouchedExperts.of(len(config.layers), device)
        self._layers: dict[int, LayerTables] = {}
        self._blocks: dict[tuple[int, int], torch.Tensor] = {}  # (layer, slot): LoRA that tables point to
        self._lora = True

    @property
    def offers(self) -> tuple[object, ...]:
        return ExpertPlaces(lambda: {"GPU": self.num_bytes}), self._touched

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights and biases on the GPU."""
        held = self._layers.values()
        return sum(t.expert_slots.numel() * t.expert_slots.element_size() + t.elementwise.num_bytes for t in held)

    def load_layer(self, layer: int, store: ExpertStore) -> None:
        layout = expert_layout(store, self._dtype.itemsize, self._quantise)
        expert_slots = self._expert_slots(store, layout)
        slots, experts = self._compute.max_slots, self._sizes.experts
        place = torch.arange(experts, dtype=torch.int32, device=self._device).repeat(slots, 1)
        address = torch.zeros(slots, experts, dtype=torch.int64, device=self._device)
        elementwise = Elementwise.of(store, self._sizes, self._device)
        self._layers[layer] = LayerTables(
            expert_slots, place, address, layout, self._touched.counts[layer], elementwise
        )

    @torch.inference_mode(False)
    def _expert_slots(self, store: ExpertStore, layout: ExpertLayout) -> torch.Tensor:
        expert_slots = torch.empty(self._sizes.experts, layout.num_bytes, dtype=torch.uint8, device=self._device)
        for name, matrix, at in zip(PROJECTIONS, layout.matrices, layout.starts, strict=True):
            weights = [store.expert(name, expert) for expert in range(self._sizes.experts)]
            self._pack.put(weights, matrix, expert_slots[:, at : at + matrix.num_bytes], self._dtype)
        return expert_slots

    def set_adapter(self, slot: int, layers: dict[int, ExpertLora] | None) -> None:
        if not 1 <= slot < self._compute.max_slots:
            raise ExpertBackendError(f"slot {slot}: allowed are 1 to {self._compute.max_slots - 1}")
        largest = max((lora.rank for lora in (layers or {}).values()), default=0)
        rank = padded_rank(largest) if largest else 0
        if rank > self._compute.max_rank:
            raise AdapterError(f"expert LoRA of rank {largest} is over --max-adapter-rank {self._compute.max_rank}")
        for layer, tables in self._layers.items():
            tables.lora_address[slot] = 0
            self._blocks.pop((layer, slot), None)
            lora = (layers or {}).get(layer)
            if lora is not None:
                self._put(layer, tables, slot, lora, rank)
        self._slots.ranks[slot] = rank
        if self._device.type == "cuda":  # the step that comes next may run on another stream
            torch.cuda.current_stream(self._device).synchronize()

    def _put(self, layer: int, tables: LayerTables, slot: int, lora: ExpertLora, rank: int) -> None:
        host, present = lora_blocks(lora, self._sizes, self._dtype, rank)
        blocks = host.to(self._device)
        self._blocks[layer, slot] = blocks
        steps = torch.arange(self._sizes.experts) * blocks.shape[1] * blocks.element_size()
        tables.lora_address[slot] = ((blocks.data_ptr() + steps) * present).to(self._device)
        scales = torch.tensor([lora.gate_scale, lora.up_scale, lora.down_scale])
        self._slots.scales[self._numbers[layer], slot] = scales.to(self._device)

    def bind(self, layer: int, buffers: ExpertBuffers) -> ExpertTask:
        if layer not in self._layers:
            raise ExpertBackendError(f"layer {layer} has no experts loaded (loaded: {sorted(self._layers)})")
        if buffers.hidden.dtype != self._dtype or buffers.hidden.device.type != self._device.type:
            got = f"{buffers.hidden.dtype} on {buffers.hidden.device}"
            raise ExpertBackendError(f"hidden is {got}; the gpu experts take {self._dtype} on {self._device}")
        return ExpertTask(layer, buffers, None)

    def begin_step(self, rows: int, *, lora: bool, eager: bool, slots: Collection[int] | None = None) -> None:
        self._lora = lora

    def post(self, task: ExpertTask, stream: Any = None) -> None:
        with on_stream(stream, self._device):
            b = task.buffers
            self._compute.run(
                b, self._layers[task.layer], self._slots, self._numbers[task.layer], b.out, lora=self._lora
            )

    def wait(self, task: ExpertTask, stream: Any = None) -> None:
        """The stream's own order does it."""

    def close(self) -> None:
        """No step may be in flight."""
        self._layers.clear()
        self._blocks.clear()
