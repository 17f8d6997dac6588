"""Hot experts on the GPU, the rest on the CPU, at the same time; both with adapters.

    post   CPU: the row's experts that are not on the GPU      GPU: those that are, while the CPU computes
    wait   out = both parts

Which experts are hot follows the routing (hybrid_policy.py); they move between steps (hybrid_mover.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from engine.errors import UserError
from engine.experts.base import ExpertBackend, ExpertBuffers, ExpertTask
from engine.experts.cuda_bridge import CudaBridge, HotPart, on_stream
from engine.experts.gpu_adapters import HostAdapters
from engine.experts.gpu_compute import GpuCompute, LayerTables
from engine.experts.gpu_layout import Sizes
from engine.experts.gpu_source import PackedSource
from engine.experts.hybrid_mover import Mover, Tables
from engine.experts.hybrid_policy import HotPolicy
from engine.lora.adapter import ExpertLora
from engine.model_config import ModelConfig
from engine.weights.store import ExpertStore


class HybridExperts(ExpertBackend):
    """`budget_bytes` of GPU memory hold experts and their LoRA; UserError if not even one expert fits. `adapters` and
    `source` may be shared with a streaming backend around this one."""

    buffers_on = "cuda"
    follows_stream = True
    beside_stream = "part"

    def __init__(
        self,
        bridge: CudaBridge,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        budget_bytes: int,
        max_rows: int,
        max_slots: int,
        max_rank: int,
        policy: HotPolicy | None = None,
    ) -> None:
        self.bridge = bridge
        self.sizes = Sizes.of(config)
        self.compute = GpuCompute(self.sizes, dtype, device, max_rows=max_rows, max_rank=max_rank, max_slots=max_slots)
        self.source = PackedSource(bridge.inner, self.sizes, device)
        self.adapters = HostAdapters(
            self.sizes, dtype, max_slots=max_slots, max_rank=max_rank, pin=device.type == "cuda"
        )
        self._device = device
        self._numbers = {layer: number for number, layer in enumerate(config.sparse_layers)}
        experts = len(self._numbers) * self.sizes.experts
        frames = min(budget_bytes // (self.sizes.frame * dtype.itemsize), experts * (1 + max_slots))
        if frames < 1:
            raise UserError(
                f"--gpu-expert-memory {budget_bytes} bytes: one expert takes {self.sizes.frame * dtype.itemsize}",
                field="gpu_expert_memory",
            )
        self._frames = torch.empty(frames, self.sizes.frame, dtype=dtype, device=device)
        self._tables = Tables.allocate(len(self._numbers), max_slots + 1, self.sizes.experts, device)
        self.mover = Mover(
            self.sizes, config.sparse_layers, self._frames, self._tables, self.source, self.adapters, policy
        )
        self._extra: dict[int, torch.Tensor] = {}  # by id of the buffers
        self._lora = True

    @property
    def num_bytes(self) -> int:
        """Bytes on the GPU."""
        return self._frames.numel() * self._frames.element_size() + self.compute.num_bytes

    def place(self, layer: int) -> torch.Tensor:
        """int32 [E] on the device: frame of each expert for base rows, -1 if the CPU computes it."""
        return self._tables.place[self._numbers[layer], 0]

    def load_layer(self, layer: int, store: ExpertStore) -> None:
        self.bridge.load_layer(layer, store)
        self.source.add(layer)

    def set_adapter(self, slot: int, layers: dict[int, ExpertLora] | None) -> None:
        """The CPU serves the slot from now on; hot experts follow as their LoRA arrives."""
        self.bridge.set_adapter(slot, layers)
        self.adapters.put(slot, layers)

    def bind(self, layer: int, buffers: ExpertBuffers) -> ExpertTask:
        task = self.bridge.bind(layer, buffers)
        if id(buffers) not in self._extra:
            self._extra[id(buffers)] = torch.zeros(buffers.hidden.shape, dtype=torch.float32, device=self._device)
            self.compute.prepare(buffers.max_rows)
        return task

    def begin_step(self, rows: int, *, lora: bool, eager: bool, slots: Collection[int] | None = None) -> None:
        self.bridge.begin_step(rows, lora=lora, eager=eager, slots=slots)
        self._lora = lora
        if rows > 0:
            self.mover.step()

    def check(self) -> None:
        self.bridge.check()

    def post(self, task: ExpertTask, stream: Any = None) -> None:
        number, b = self._numbers[task.layer], task.buffers
        hot = self._hot(task)
        self.bridge.post_part(task, hot, stream)
        layer = LayerTables(self._frames, hot.place, self._tables.address[number])
        with on_stream(stream, self._device):
            self.compute.run(b, layer, self._tables.slots, number, hot.extra, lora=self._lora)

    def wait(self, task: ExpertTask, stream: Any = None) -> None:
        self.bridge.wait_part(task, self._hot(task), stream)

    def _hot(self, task: ExpertTask) -> HotPart:
        number = self._numbers[task.layer]
        return HotPart(self._tables.place[number], self._tables.uses[number], self._extra[id(task.buffers)])

    def close(self) -> None:
        """No step may be in flight."""
        self.source.close()
        self.bridge.close()
