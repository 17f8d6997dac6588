"""Many adapters in one batch, by segments (Punica's SGMV, arXiv 2310.18547): tokens sorted by adapter, cut into tiles.

shrink:  part[s, p, i] = x[order[i]] A[slot, p]^T over the s-th share of the inner dimension
expand:  y[order[i]]  += scale[slot, p] * (sum_s part[s, p, i]) B[slot]^T      columns of projection p

Shares are summed in one order, so a row's result depends neither on its neighbours nor on timing.
"""

import torch
import triton
import triton.language as tl

TILE = 16  # tokens
_BLOCK_K = 128
_BLOCK_N = 64
_MAX_SHARES = 8


@triton.jit
def _shrink(
    x, a, ranks, order, tiles, part, x_stride, inner, share, a_slot, tokens,
    PARTS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, p, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(tiles + tile * 3)
    if slot == 0:
        return
    rank = tl.load(ranks + slot)
    if rank == 0:
        return
    start, length = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    i = tl.arange(0, ROWS)
    live = i < length
    row = tl.load(order + start + i, live, other=0).to(tl.int64)
    r = tl.arange(0, RANK)
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros([ROWS, RANK], tl.float32)
    table = a + slot.to(tl.int64) * a_slot + (p * RANK + r[None, :]) * inner
    for at in range(s * share, tl.minimum((s + 1) * share, inner), BLOCK_K):
        inside = at + k < inner
        left = tl.load(x + row[:, None] * x_stride + at + k[None, :], live[:, None] & inside[None, :], other=0.0)
        right = tl.load(table + at + k[:, None], (r[None, :] < rank) & inside[:, None], other=0.0)
        total += tl.dot(left, right.to(left.dtype), input_precision=PRECISION)
    place = part + ((s * PARTS + p) * tokens + start + i[:, None]) * RANK + r[None, :]
    tl.store(place, total, live[:, None])


@triton.jit
def _expand(
    y, b, ranks, scales, order, tiles, part, y_stride, outer, shares, first, second, tokens,
    PARTS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, column = tl.program_id(0), tl.program_id(1) * BLOCK_N
    slot = tl.load(tiles + tile * 3)
    if slot == 0:
        return
    rank = tl.load(ranks + slot)
    if rank == 0:
        return
    start, length = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    p = (column >= first).to(tl.int32) + (column >= second).to(tl.int32)
    i = tl.arange(0, ROWS)
    live = i < length
    r = tl.arange(0, RANK)
    inside = live[:, None] & (r[None, :] < rank)
    h = tl.zeros([ROWS, RANK], tl.float32)
    for s in range(shares):
        h += tl.load(part + ((s * PARTS + p) * tokens + start + i[:, None]) * RANK + r[None, :], inside, other=0.0)
    n = column + tl.arange(0, BLOCK_N)
    table = b + (slot.to(tl.int64) * outer + n[None, :]) * RANK + r[:, None]
    right = tl.load(table, (n[None, :] < outer) & (r[:, None] < rank), other=0.0).to(tl.float32)
    delta = tl.dot(h, right, input_precision=PRECISION) * tl.load(scales + slot * PARTS + p)
    row = tl.load(order + start + i, live, other=0).to(tl.int64)
    place = y + row[:, None] * y_stride + n[None, :]
    mask = live[:, None] & (n[None, :] < outer)
    value = tl.load(place, mask, other=0.0)
    tl.store(place, (value.to(tl.float32) + delta).to(value.dtype), mask)


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ranks: torch.Tensor,
    scales: torch.Tensor,
    starts: list[int],
    order: torch.Tensor,
    tiles: torch.Tensor,
) -> None:
    """y [T, out] += LoRA of each row's slot, in place, for P <= 3 projections of x [T, in] side by side in y.

    a [slots, P R, in], b [slots, out, R], ranks int32 [slots] (0: nothing), scales float32 [slots, P]; R a power of two
    from 16. starts: the first column of each projection, multiples of 64 but the first. order int32 [T] and
    tiles int32 [n, 3] as in engine.linear.segments.
    """
    parts, inner, outer = len(starts), x.shape[1], y.shape[1]
    rank = b.shape[2]
    share = max(_BLOCK_K, triton.cdiv(triton.cdiv(inner, _MAX_SHARES), _BLOCK_K) * _BLOCK_K)
    shares = triton.cdiv(inner, share)
    tokens, count = order.shape[0], tiles.shape[0]
    part = torch.empty((shares, parts, tokens, rank), dtype=torch.float32, device=x.device)
    exact = x.dtype == torch.float32
    _shrink[(count, parts, shares)](
        x, a, ranks, order, tiles, part, x.stride(0), inner, share, a.stride(0), tokens,
        PARTS=parts, RANK=rank, ROWS=TILE, BLOCK_K=_BLOCK_K // 2 if exact else _BLOCK_K,
        PRECISION="ieee" if exact else "tf32", num_warps=4,
    )  # fmt: skip
    bounds = [*starts[1:], outer, outer][:2]
    _expand[(count, triton.cdiv(outer, _BLOCK_N))](
        y, b, ranks, scales, order, tiles, part, y.stride(0), outer, shares, bounds[0], bounds[1], tokens,
        PARTS=parts, RANK=rank, ROWS=TILE, BLOCK_N=_BLOCK_N, PRECISION="ieee" if exact else "tf32", num_warps=4,
    )  # fmt: skip
