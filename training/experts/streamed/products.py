"""Matrix products of rows that lie sorted by expert, on any device: grouped kernels on a GPU, else expert by expert."""

from __future__ import annotations

from itertools import pairwise

import torch


def multiply(x: torch.Tensor, weights: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """[n, out] = x[row] weights[expert of the row], summed in float32; x [n, in], weights [E, in, out], rows start[e]
    to start[e + 1] of expert e (int32 [E + 1])."""
    if not len(x):
        return x.new_empty(0, weights.shape[2])
    if x.is_cuda and x.dtype == torch.bfloat16:
        product: torch.Tensor = torch._grouped_mm(x, weights, offs=start[1:])
        return product
    out = x.new_empty(len(x), weights.shape[2])
    for expert, (first, last) in enumerate(pairwise(start.tolist())):
        if last > first:
            torch.mm(x[first:last], weights[expert], out=out[first:last])
    return out


def outer(a: torch.Tensor, b: torch.Tensor, start: torch.Tensor, scale: float) -> torch.Tensor:
    """float32 [E, M, N] = scale a[rows of e]^T b[rows of e]; a [n, M], b [n, N]. Zeros for an expert without rows."""
    if a.is_cuda:
        from training.experts.streamed import kernels

        return kernels.outer(a, b, start, scale)
    out = torch.zeros(len(start) - 1, a.shape[1], b.shape[1], dtype=torch.float32, device=a.device)
    for expert, (first, last) in enumerate(pairwise(start.tolist())):
        if last > first:
            torch.mm(a[first:last].T.float(), b[first:last].float(), out=out[expert])
    return out.mul_(scale)
