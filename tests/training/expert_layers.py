"""Layers of experts in any packed format, steps over them, and how far two results are apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from native import _native
from tests.native.expert_layers import tensor
from training.experts.base import ExpertLora, TrainableExperts
from training.experts.native import NativeTrainableExperts
from training.experts.reference import ReferenceExperts

PROJECTIONS = ("gate", "up", "down")


class PackedLayer:
    """Random experts packed as `format` from a GGML type."""

    def __init__(self, pool: Any, kind: str, format: str, experts: int, hidden: int, inner: int) -> None:
        self.experts, self.hidden, self.inner = experts, hidden, inner
        self.packed = _native.ExpertLayer(experts, hidden, inner, [format] * 3, pool.groups)
        self.pool = pool
        for p, name in enumerate(PROJECTIONS):
            weight, _ = tensor(kind, name, *self._shape(p), 10 * p + 1, experts)
            rows = weight.data.reshape(experts, -1)
            self.packed.load(pool, p, kind, 0, [rows[e].ctypes.data for e in range(experts)])

    def _shape(self, projection: int) -> tuple[int, int]:
        return (self.hidden, self.inner) if projection == 2 else (self.inner, self.hidden)

    def reference(self) -> ReferenceExperts:
        """Over the values that the packed weights stand for."""
        values = [torch.empty(self.experts, *self._shape(p)) for p in range(3)]
        for p in range(3):
            for e in range(self.experts):
                self.packed.dequantise(p, e, values[p][e].data_ptr())
        return ReferenceExperts(*values)

    def native(self, isa: str = "", keep: bool = True) -> NativeTrainableExperts:
        return NativeTrainableExperts(
            self.packed,
            _native.ExpertTrainer(self.pool, isa),
            num_experts=self.experts,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            keep=keep,
        )

    def lora(self, rank: int, scaling: float = 0.5) -> ExpertLora:
        """With a B that is not zero."""
        lora = ExpertLora(self.experts, rank, self.hidden, self.inner, scaling)
        for b in lora.matrices()[3:]:
            torch.nn.init.normal_(b, std=rank**-0.5)
        return lora


@dataclass
class Step:
    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    slots: torch.Tensor
    grad_out: torch.Tensor

    @classmethod
    def draw(cls, rows: int, top_k: int, layer: PackedLayer, slots: list[int], dtype: torch.dtype, seed: int) -> Step:
        """One choice is skipped, and one in four rows has the same first expert."""
        g = torch.Generator().manual_seed(seed)
        ids = torch.stack([torch.randperm(layer.experts, generator=g)[:top_k] for _ in range(rows)])
        ids[::4, 0] = 0
        if rows > 1:
            ids[-1, -1] = -1
        return cls(
            torch.randn(rows, layer.hidden, generator=g).to(dtype),
            ids,
            torch.rand(rows, top_k, generator=g) + 0.1,
            torch.tensor([slots[i % len(slots)] for i in range(rows)], dtype=torch.int32),
            torch.randn(rows, layer.hidden, generator=g).to(dtype),
        )


def run(experts: TrainableExperts, step: Step, loras: dict[int, ExpertLora]) -> dict[str, torch.Tensor]:
    """The output and every gradient, by name."""
    hidden, weights = step.hidden.clone().requires_grad_(), step.weights.clone().requires_grad_()
    for lora in loras.values():
        lora.zero_grad()
    out = experts.forward(hidden, step.ids, weights, step.slots, loras)
    out.backward(step.grad_out)
    assert hidden.grad is not None and weights.grad is not None
    found = {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad}
    for slot, lora in loras.items():
        for name, matrix in lora.named_parameters():
            found[f"{slot} {name}"] = torch.zeros_like(matrix) if matrix.grad is None else matrix.grad.clone()
    return found


def errors(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], step: Step) -> dict[str, float]:
    """mean|d| / mean|ref| of each. A router's weight has the gradient <grad_out, y>, which may happen to be near zero
    where there are only a few: what such a product of random vectors comes to is the least that counts."""
    least = float(step.grad_out.float().norm(dim=1).mean() * want["out"].float().norm(dim=1).mean())
    result = {}
    for name, ref in want.items():
        size = float(ref.double().abs().mean())
        if name == "weights":
            size = max(size, least / ref.shape[1] / step.hidden.shape[1] ** 0.5)
        difference = float((got[name].double() - ref.double()).abs().mean())
        result[name] = difference / size if size else difference
    return result
