"""Hot experts on the GPU, the rest on the CPU, at the same time; both with adapters.

    post   CPU: the row's experts that are not on the GPU      GPU: those that are, while the CPU computes
    wait   out = both parts

Which experts are hot follows the routing (policy.py); they move between steps (mover.py). A profile of an earlier run
says with which to begin (profile.py), otherwise with as many of each layer.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from engine.architectures.config import ModelConfig
from engine.errors import ExpertBackendError, UserError
from engine.experts.base import ExpertBackend, ExpertBuffers, ExpertTask
from engine.experts.capabilities import (
    ExpertCounters,
    ExpertPlaces,
    HotExperts,
    HotPart,
    NativeKernels,
    PackedWeights,
    PartialTasks,
    TouchedExperts,
    needed,
)
from engine.experts.gpu.compute import LayerTables
from engine.experts.gpu.layout import Sizes
from engine.experts.gpu.parts import GpuParts
from engine.experts.hybrid.mover import Mover, Tables
from engine.experts.hybrid.policy import HotPolicy
from engine.experts.hybrid.profile import Profile
from engine.experts.stream import on_stream
from engine.lora.adapter import ExpertLora
from engine.weights.store import ExpertStore


class HybridExperts(ExpertBackend):
    """`inner` computes the rest and offers partial tasks and packed weights. `budget_bytes` of GPU memory hold experts
    and their LoRA, each expert in `expert_bytes`, what the largest takes there (default: plain numbers); UserError if
    not even one fits."""

    buffers_on = "cuda"
    follows_stream = True

    def __init__(
        self,
        inner: ExpertBackend,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        budget_bytes: int,
        max_rows: int,
        max_slots: int,
        max_rank: int,
        policy: HotPolicy | None = None,
        profile: Path | None = None,
        expert_bytes: int | None = None,
    ) -> None:
        self._inner = inner
        self._rest = needed(inner, PartialTasks)
        self.parts = GpuParts.make(
            config,
            needed(inner, PackedWeights),
            dtype,
            device,
            max_rows=max_rows,
            max_slots=max_slots,
            max_rank=max_rank,
        )
        sizes = self.parts.sizes
        self._device = device
        self._numbers = {layer: number for number, layer in enumerate(config.sparse_layers)}
        experts = len(self._numbers) * sizes.experts
        size = expert_bytes or sizes.expert_values * dtype.itemsize
        expert_slots = min(budget_bytes // size, experts * (1 + max_slots))
        if expert_slots < 1:
            raise UserError(
                f"--gpu-expert-memory {budget_bytes} bytes: one expert takes {size}", field="gpu_expert_memory"
            )
        self._expert_slots = torch.empty(expert_slots, size, dtype=torch.uint8, device=device)
        self._dtype = dtype
        self._tables = Tables.allocate(len(self._numbers), max_slots + 1, sizes.experts, device)
        self._profile = None if profile is None else Profile(profile, config.sparse_layers, sizes.experts)
        known = None if self._profile is None else self._profile.read()
        if known is not None:
            policy = policy or HotPolicy(experts)
            policy.average.copy_(known)
        self._waiting = set(self._numbers)  # layers that are still to be loaded: the first experts come from all
        self.mover = Mover(
            sizes,
            config.sparse_layers,
            self._expert_slots,
            self._tables,
            self.parts.source,
            self.parts.adapters,
            dtype,
            policy,
        )
        self._extra: dict[int, torch.Tensor] = {}  # by id of the buffers
        self._lora = True

    @staticmethod
    def scratch_bytes(sizes: Sizes, rows: int) -> int:
        """What buffers of so many rows take on the GPU: its own part of each row."""
        return rows * sizes.hidden * 4

    @property
    def num_bytes(self) -> int:
        """Bytes on the GPU."""
        return self._expert_slots.numel() * self._expert_slots.element_size() + self.parts.compute.num_bytes

    @property
    def offers(self) -> tuple[object, ...]:
        passed = PackedWeights, NativeKernels, ExpertCounters, TouchedExperts
        inner = (self._inner.capability(kind) for kind in passed)
        places = ExpertPlaces(self._bytes_by_device, lambda: (self.mover.num_choices, self.mover.num_hits))
        hot = HotExperts(self._expert_slots, lambda layer: self.mover.expert_slots_of(self._numbers[layer]))
        return self.parts, places, hot, *(offered for offered in inner if offered is not None)

    def _bytes_by_device(self) -> dict[str, int]:
        places = self._inner.capability(ExpertPlaces)
        held = {} if places is None else dict(places.num_bytes())
        size = self._expert_slots.shape[1] * self._expert_slots.element_size()
        return held | {"GPU": self.mover.resident * size}

    def place(self, layer: int) -> torch.Tensor:
        """int32 [E] on the device: expert slot of each expert for base rows, -1 if the CPU computes it."""
        return self._tables.place[self._numbers[layer], 0]

    def load_layer(self, layer: int, store: ExpertStore) -> None:
        self._inner.load_layer(layer, store)
        layout = self.parts.load(layer, store).layout(self._dtype.itemsize)
        if layout.num_bytes > self._expert_slots.shape[1]:
            raise ExpertBackendError(
                f"an expert of layer {layer} takes {layout.num_bytes} bytes on the GPU; expert slots are of "
                f"{self._expert_slots.shape[1]}"
            )
        self._waiting.discard(layer)
        if not self._waiting:
            self.mover.fill()

    def set_adapter(self, slot: int, layers: dict[int, ExpertLora] | None) -> None:
        """The CPU serves the slot from now on; hot experts follow as their LoRA arrives."""
        self._inner.set_adapter(slot, layers)
        self.parts.adapters.put(slot, layers)

    def bind(self, layer: int, buffers: ExpertBuffers) -> ExpertTask:
        task = self._inner.bind(layer, buffers)
        if id(buffers) not in self._extra:
            self._extra[id(buffers)] = torch.zeros(buffers.hidden.shape, dtype=torch.float32, device=self._device)
        return task

    def begin_step(self, rows: int, *, lora: bool, eager: bool, slots: Collection[int] | None = None) -> None:
        self._inner.begin_step(rows, lora=lora, eager=eager, slots=slots)
        self._lora = lora
        if rows > 0:
            self.mover.step()
            if self._profile is not None and self._profile.due:
                self._profile.write(self.mover.policy.average)

    def check(self) -> None:
        self._inner.check()

    def post(self, task: ExpertTask, stream: Any = None) -> None:
        number, b = self._numbers[task.layer], task.buffers
        hot = self._hot(task)
        self._rest.post(task, hot, stream)
        layout = self.parts.source[task.layer].layout(self._dtype.itemsize)
        layer = LayerTables(
            self._expert_slots, hot.place, self._tables.address[number], layout,
            elementwise=self.parts.elementwise[task.layer],
        )  # fmt: skip
        with on_stream(stream, self._device):
            self.parts.compute.run(b, layer, self._tables.slots, number, hot.extra, lora=self._lora)

    def wait(self, task: ExpertTask, stream: Any = None) -> None:
        self._rest.wait(task, self._hot(task), stream)

    def _hot(self, task: ExpertTask) -> HotPart:
        number = self._numbers[task.layer]
        return HotPart(self._tables.place[number], self._tables.uses[number], self._extra[id(task.buffers)])

    def close(self) -> None:
        """No step may be in flight."""
        if self._profile is not None:
            self._profile.close(self.mover.policy.average)
        self.parts.close()
        self._inner.close()
