"""What a layer's training step is compared with where nothing of ours is there: torch's own products and autograd."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import nn


class TorchExperts:
    """A layer as transformers and PEFT compute it without us: a loop over the experts, frozen weights and LoRA of
    rank r as linear layers, autograd. Weights and products are `dtype`, LoRA's parameters float32."""

    def __init__(self, experts: int, hidden: int, intermediate: int, rank: int, dtype: torch.dtype) -> None:
        sizes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
        self.dtype = dtype
        self.weights = {
            name: torch.empty(experts, *size, dtype=dtype).normal_(std=0.02) for name, size in sizes.items()
        }
        self.a = {n: nn.Parameter(torch.randn(experts, rank, size[1]) * 0.02) for n, size in sizes.items()}
        self.b = {n: nn.Parameter(torch.randn(experts, size[0], rank) * 0.02) for n, size in sizes.items()}

    def _linear(self, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        a, b = self.a[name][expert].to(self.dtype), self.b[name][expert].to(self.dtype)
        return F.linear(x, self.weights[name][expert]) + 2.0 * F.linear(F.linear(x, a), b)

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [T, H]; ids, weights [T, k]."""
        out = torch.zeros_like(hidden)
        for expert in torch.unique(ids).tolist():
            rows, choice = torch.where(ids == expert)
            x = hidden[rows]
            h = F.silu(self._linear("gate", expert, x)) * self._linear("up", expert, x)
            out = out.index_add(0, rows, self._linear("down", expert, h) * weights[rows, choice, None].to(self.dtype))
        return out

    def step_s(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[float, float]:
        """Seconds of forward and of backward."""
        x, w = hidden.to(self.dtype).requires_grad_(), weights.clone().requires_grad_()
        for parameter in (*self.a.values(), *self.b.values()):
            parameter.grad = None
        began = time.perf_counter()
        out = self.forward(x, ids, w)
        middle = time.perf_counter()
        out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]
        return middle - began, time.perf_counter() - middle
