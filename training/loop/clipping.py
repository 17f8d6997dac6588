"""Gradients clipped together, wherever they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.linalg import vector_norm
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip(parameters: Iterable[nn.Parameter], most: float) -> torch.Tensor:
    """The norm of all gradients, which are scaled down to a norm of `most` if it is larger. On a CPU matrix by matrix
    of a stack: torch takes the norm of a whole tensor on one thread."""
    held = [parameter for parameter in parameters if parameter.grad is not None]
    grads = [parameter.grad for parameter in held if parameter.grad is not None]
    norms = [
        vector_norm(vector_norm(grad.flatten(1), dim=1))
        for grad in grads
        if grad.dim() > 2 and grad.device.type == "cpu"
    ]
    rest = [grad for grad in grads if grad.dim() <= 2 or grad.device.type != "cpu"]
    norms.append(get_total_norm(rest).cpu())
    total: torch.Tensor = vector_norm(torch.stack(norms))
    if not total + 1e-6 <= most:
        clip_grads_with_norm_(held, most, total)
    return total
