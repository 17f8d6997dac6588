"""Tensors between a GPU and the CPU, through page-locked memory in both directions."""

from __future__ import annotations

from typing import Any

import torch


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On `device`, differentiable; the tensor itself if it is on a device of that type."""
    if tensor.device.type == device.type:
        return tensor
    there: torch.Tensor = _Moved.apply(tensor, device)  # type: ignore[no-untyped-call]
    return there


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        ctx.device = tensor.device
        return _copied(tensor, device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _copied(grad, ctx.device), None


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return tensor.to(device)
    locked = tensor.is_cuda  # other devices, as in tests, have no such memory
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=locked).copy_(tensor)
