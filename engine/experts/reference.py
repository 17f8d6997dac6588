"""Routed experts in plain torch: the oracle for every other backend, all LoRA forms, any device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from engine.architectures.parts.mlp import Activation
from engine.errors import ExpertBackendError
from engine.experts.base import ExpertBackend, ExpertBuffers, ExpertTask
from engine.experts.capabilities import TouchedExperts
from engine.lora.adapter import ExpertLora
from engine.weights.store import ExpertStore


@dataclass(frozen=True)
class _Weights:
    gate: torch.Tensor  # [E, I, H]
    up: torch.Tensor  # [E, I, H]
    down: torch.Tensor  # [E, H, I]
    activation: Activation
    biases: dict[str, torch.Tensor]  # float32 [E, I] or [E, H]

    def add_bias(self, projection: str, expert: int, values: torch.Tensor) -> None:
        """To float32 [rows, out], in place."""
        if projection in self.biases:
            values += self.biases[projection][expert]

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        limit, alpha = self.activation.limit, self.activation.alpha
        if limit is None:
            return F.silu(gate) * up
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)


class ReferenceExperts(ExpertBackend):
    """Weights dequantised to `dtype`; products in `dtype`, LoRA and the weighted sum in float32."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.buffers_on = "cpu" if device.type == "cpu" else "cuda"
        self._layers: dict[int, _Weights] = {}
        self._adapters: dict[int, dict[int, ExpertLora]] = {}  # slot -> layer -> LoRA
        self._touched = TouchedExperts.of(0)

    @property
    def offers(self) -> tuple[object, ...]:
        return (self._touched,)

    def load_layer(self, layer: int, store: ExpertStore) -> None:
        gate, up, down = (store.stacked(p, self.dtype).to(self.device) for p in ("gate", "up", "down"))
        biases = {name: bias.dequantise(torch.float32).to(self.device) for name, bias in store.biases.items()}
        self._layers[layer] = _Weights(gate, up, down, store.activation, biases)
        if layer >= len(self._touched.counts):
            self._touched = TouchedExperts.of(layer + 1)

    def set_adapter(self, slot: int, layers: dict[int, ExpertLora] | None) -> None:
        if layers:
            self._adapters[slot] = {layer: lora.copy() for layer, lora in layers.items()}
        else:
            self._adapters.pop(slot, None)

    def bind(self, layer: int, buffers: ExpertBuffers) -> ExpertTask:
        if layer not in self._layers:
            raise ExpertBackendError(f"layer {layer} has no experts loaded (loaded: {sorted(self._layers)})")
        return ExpertTask(layer, buffers, None)

    def post(self, task: ExpertTask, stream: Any = None) -> None:
        n = int(task.buffers.bsz[0])
        if not 0 <= n <= task.buffers.max_rows:
            raise ExpertBackendError(f"bsz is {n}, the buffers hold 0 to {task.buffers.max_rows} rows")
        b = task.buffers
        b.out[:n] = self._forward(task.layer, b.hidden[:n], b.ids[:n], b.weights[:n], b.slots[:n])

    def wait(self, task: ExpertTask, stream: Any = None) -> None:
        """`post` has already computed."""

    def close(self) -> None:
        self._layers.clear()
        self._adapters.clear()

    def base_product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """One pass over one expert's base weight: x [rows, in], weight [out, in] -> float32 [rows, out]."""
        return F.linear(x.to(self.dtype), weight).float()

    def _forward(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        base = self._layers[layer]
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        chosen = torch.unique(ids[ids >= 0]).tolist()
        self._touched.counts[layer] += len(chosen)
        for expert in chosen:
            rows, choice = torch.where(ids == expert)
            groups = list(self._groups(layer, slots[rows]))
            h = x[rows]
            gate = self.base_product(h, base.gate[expert])
            up = self.base_product(h, base.up[expert])
            base.add_bias("gate", expert, gate)
            base.add_bias("up", expert, up)
            for index, lora in groups:
                gate[index] += _delta(h[index], lora.gate_a[expert], lora.gate_b[expert], lora.gate_scale)
                up[index] += _delta(h[index], lora.up_a[expert], lora.up_b[expert], lora.up_scale)
            inner = base.activate(gate, up).to(self.dtype)
            down = self.base_product(inner, base.down[expert])
            base.add_bias("down", expert, down)
            for index, lora in groups:
                down[index] += _delta(inner[index], lora.down_a[expert], lora.down_b[expert], lora.down_scale)
            out.index_add_(0, rows, down * weights[rows, choice, None])
        return out.to(x.dtype)

    def _groups(self, layer: int, slots: torch.Tensor) -> Iterator[tuple[torch.Tensor, ExpertLora]]:
        """The rows of each adapter that changes this layer's experts; base rows are in none."""
        for slot in torch.unique(slots).tolist():
            lora = self._adapters.get(slot, {}).get(layer)
            if lora is not None:
                yield torch.where(slots == slot)[0], lora


def _delta(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    return (x.float() @ a.float().to(x.device).T @ b.float().to(x.device).T) * scale
