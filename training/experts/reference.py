"""Routed experts in plain torch autograd: what the kernels are compared with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from engine.weights.store import ExpertStore
from training.experts.base import ExpertLora, TrainableExperts


class ReferenceExperts(TrainableExperts):
    """gate, up [E, I, H] and down [E, H, I], computed in their type whatever hidden's is."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        self.gate, self.up, self.down = gate, up, down
        self.num_experts, self.intermediate_size, self.hidden_size = gate.shape

    @classmethod
    def from_store(cls, store: ExpertStore, dtype: torch.dtype = torch.float32) -> ReferenceExperts:
        """A layer's weights, dequantised."""
        return cls(*(store.stacked(name, dtype) for name in ("gate", "up", "down")))

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
                gate = F.linear(x, self.gate[expert]) + _delta(lora, "gate", expert, x)
                up = F.linear(x, self.up[expert]) + _delta(lora, "up", expert, x)
                h = F.silu(gate) * up
                y = F.linear(h, self.down[expert]) + _delta(lora, "down", expert, h)
                out = out.index_add(0, rows, y * weights[rows, choice, None].to(y.dtype))
        return out.to(hidden.dtype)


def _delta(lora: ExpertLora | None, name: str, expert: int, x: torch.Tensor) -> torch.Tensor | float:
    """s B A x of one expert's projection."""
    if lora is None:
        return 0.0
    a = lora.get_parameter(f"{name}_lora_a")[expert].to(x.dtype)
    b = lora.get_parameter(f"{name}_lora_b")[expert].to(x.dtype)
    return lora.scaling * F.linear(F.linear(x, a), b)
