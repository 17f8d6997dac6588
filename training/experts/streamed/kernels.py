"""The sums over an expert's rows that gradients of LoRA are, as a Triton kernel."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 64  # added up at a time


@triton.jit
def _outer(
    a, b, start, out, a_step, b_step, scale, m_size, n_size,
    BM: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    last = tl.load(start + e + 1)
    sums = tl.zeros([BM, BN], tl.float32)
    for first in range(tl.load(start + e), last, ROWS):
        row = first + tl.arange(0, ROWS)
        real = (row < last)[:, None]
        left = tl.load(a + row[:, None].to(tl.int64) * a_step + m[None, :], mask=real & (m < m_size)[None, :], other=0)
        right = tl.load(b + row[:, None].to(tl.int64) * b_step + n[None, :], mask=real & (n < n_size)[None, :], other=0)
        sums = tl.dot(tl.trans(left), right, sums, input_precision="ieee")
    at = out + (e.to(tl.int64) * m_size + m[:, None]) * n_size + n[None, :]
    tl.store(at, sums * scale, mask=(m < m_size)[:, None] & (n < n_size)[None, :])


def outer(a: torch.Tensor, b: torch.Tensor, start: torch.Tensor, scale: float) -> torch.Tensor:
    """float32 [E, M, N] = scale a[rows of e]^T b[rows of e], summed in float32; a [n, M], b [n, N], rows start[e] to
    start[e + 1] of expert e (int32 [E + 1]). Zeros for an expert without rows."""
    experts, m, n = len(start) - 1, a.shape[1], b.shape[1]
    out = torch.empty(experts, m, n, dtype=torch.float32, device=a.device)
    bm, bn = _columns(m), _columns(n)
    _outer[(experts, triton.cdiv(m, bm), triton.cdiv(n, bn))](
        a, b, start, out, a.stride(0), b.stride(0), scale, m, n, BM=bm, BN=bn, ROWS=_ROWS, num_warps=4, num_stages=2
    )  # fmt: skip
    return out


def _columns(size: int) -> int:
    """Of a program: a power of two that a matrix instruction has, at most 64."""
    return min(64, max(16, 1 << (size - 1).bit_length()))
