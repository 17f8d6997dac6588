"""Dense projections with per-row adapters in plain torch: the oracle."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.linear.base import LatentUp, Linear, LinearBackend, LoraBatch
from engine.linear.latent import TorchLatentUp
from engine.lora.adapter import LoraPair
from engine.weights.store import WeightTensor


class ReferenceLinear(Linear):
    """Weight dequantised to `weight.dtype`. LoRA runs in float32 and is added before rounding."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self._pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        y = F.linear(x, self.weight, self.bias)
        if lora is not None and self._pairs:
            for slot, rows in lora.groups:
                if slot in self._pairs:
                    a, b = self._pairs[slot]
                    y[rows] = (y[rows].float() + x[rows].float() @ a.T @ b.T).to(y.dtype)
        return y

    def set_adapter(self, slot: int, pair: LoraPair | None) -> None:
        if pair is None:
            self._pairs.pop(slot, None)
        else:
            device = self.weight.device
            self._pairs[slot] = (pair.a.float().to(device), (pair.b.float() * pair.scale).to(device))


class ReferenceLinearBackend(LinearBackend):
    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device

    def load(self, name: str, weight: WeightTensor, bias: WeightTensor | None) -> ReferenceLinear:
        dense = weight.dequantise(self.dtype).to(self.device)
        return ReferenceLinear(dense, None if bias is None else bias.dequantise(self.dtype).to(self.device))

    def latent_up(self, name: str, weight: WeightTensor, heads: int, nope: int) -> LatentUp:
        dense = weight.dequantise(self.dtype).to(self.device)
        return TorchLatentUp(dense.view(heads, -1, weight.shape[1]), nope)
