"""Routed experts in plain torch autograd: what the kernels are compared with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from engine.architectures.parts.mlp import SILU, Activation
from engine.weights.store import ExpertStore
from training.experts.base import ExpertLora, TrainableExperts


class ReferenceExperts(TrainableExperts):
    """gate, up [E, I, H] and down [E, H, I], computed in their type whatever hidden's is. `biases`: of gate, up [E, I]
    and down [E, H], by name, where there are some."""

    def __init__(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        biases: Mapping[str, torch.Tensor] | None = None,
        activation: Activation = SILU,
    ) -> None:
        self.gate, self.up, self.down = gate, up, down
        self.biases, self.activation = biases or {}, activation
        self.num_experts, self.intermediate_size, self.hidden_size = gate.shape

    @classmethod
    def from_store(cls, store: ExpertStore, dtype: torch.dtype = torch.float32) -> ReferenceExperts:
        """A layer's weights, dequantised."""
        biases = {name: bias.dequantise(dtype) for name, bias in store.biases.items()}
        gate, up, down = (store.stacked(name, dtype) for name in ("gate", "up", "down"))
        return cls(gate, up, down, biases, store.activation)

    def forward(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        slots: torch.Tensor,
        loras: Mapping[int, ExpertLora],
    ) -> torch.Tensor:
        self.check(hidden, ids, weights, slots, loras)
        out = torch.zeros(hidden.shape, dtype=self.gate.dtype, device=hidden.device)
        for expert in torch.unique(ids[ids >= 0]).tolist():
            for slot in torch.unique(slots).tolist():
                rows, choice = torch.where((ids == expert) & (slots == slot)[:, None])
                x = hidden[rows].to(self.gate.dtype)
                lora = loras.get(slot)
                gate = self._product("gate", expert, x) + _delta(lora, "gate", expert, x)
                up = self._product("up", expert, x) + _delta(lora, "up", expert, x)
                h = self._activate(gate, up)
                y = self._product("down", expert, h) + _delta(lora, "down", expert, h)
                out = out.index_add(0, rows, y * weights[rows, choice, None].to(y.dtype))
        return out.to(hidden.dtype)

    def _product(self, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = getattr(self, name)[expert]
        return F.linear(x, weight, self.biases[name][expert] if name in self.biases else None)

    def _activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        limit = self.activation.limit
        if limit is None:
            return F.silu(gate) * up
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(self.activation.alpha * gate) * (up.clamp(-limit, limit) + 1)


def _delta(lora: ExpertLora | None, name: str, expert: int, x: torch.Tensor) -> torch.Tensor | float:
    """s B A x of one expert's projection."""
    if lora is None:
        return 0.0
    a = lora.get_parameter(f"{name}_lora_a")[expert].to(x.dtype)
    b = lora.get_parameter(f"{name}_lora_b")[expert].to(x.dtype)
    return lora.scaling * F.linear(F.linear(x, a), b)
