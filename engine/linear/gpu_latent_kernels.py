"""Adapters of the projection from latents to heads, many in one batch: a tile of tokens and a head a program.

y[t, h] += scale[slot] (x[t, h] F[slot, h]^T) S[slot, h]^T      F [R, in], S [out, R], of which one is the same for all
heads
"""

import torch
import triton
import triton.language as tl

TILE = 16  # tokens
_BLOCK = 64


@triton.jit
def _add(
    y, x, f, s, ranks, scales, order, tiles, y_t, y_h, x_t, x_h, f_slot, f_head, f_r, f_k, s_slot, s_head, s_n, s_r,
    inner, outer, RANK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
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
    r, block = tl.arange(0, RANK), tl.arange(0, BLOCK)
    first = f + slot.to(tl.int64) * f_slot + head * f_head + r[None, :] * f_r
    second = s + slot.to(tl.int64) * s_slot + head * s_head + r[:, None] * s_r
    small = tl.zeros([ROWS, RANK], tl.float32)
    for at in range(0, inner, BLOCK):
        k = at + block
        left = tl.load(
            x + row[:, None] * x_t + head * x_h + k[None, :], live[:, None] & (k[None, :] < inner), other=0.0
        )
        right = tl.load(first + k[:, None] * f_k, (r[None, :] < rank) & (k[:, None] < inner), other=0.0)
        small += tl.dot(left, right.to(left.dtype), input_precision=PRECISION)
    scale = tl.load(scales + slot)
    for at in range(0, outer, BLOCK):
        n = at + block
        right = tl.load(second + n[None, :] * s_n, (n[None, :] < outer) & (r[:, None] < rank), other=0.0)
        more = tl.dot(small, right.to(tl.float32), input_precision=PRECISION) * scale
        place, mask = y + row[:, None] * y_t + head * y_h + n[None, :], live[:, None] & (n[None, :] < outer)
        value = tl.load(place, mask, other=0.0)
        tl.store(place, (value.to(tl.float32) + more).to(value.dtype), mask)


def add_latent_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    ranks: torch.Tensor,
    scales: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
) -> None:
    """y [T, H, out] += LoRA of each row's slot to x [T, H, in], in place; the last dimensions of both are contiguous.

    first [slots, H or 1, R, in], second [slots, H or 1, out, R], of any strides; ranks int32 [slots] (0: nothing),
    scales float32 [slots, 1]; R a power of two from 16. order and tiles as in engine.linear.segments.
    """
    heads, inner, outer, rank = y.shape[1], x.shape[2], y.shape[2], second.shape[3]
    f_head, s_head = (part.stride(1) if part.shape[1] > 1 else 0 for part in (first, second))
    exact = x.dtype == torch.float32
    _add[(tiles.shape[0], heads)](
        y, x, first, second, ranks, scales, order, tiles,
        y.stride(0), y.stride(1), x.stride(0), x.stride(1),
        first.stride(0), f_head, first.stride(2), first.stride(3),
        second.stride(0), s_head, second.stride(2), second.stride(3),
        inner, outer, RANK=rank, ROWS=TILE, BLOCK=_BLOCK, PRECISION="ieee" if exact else "tf32", num_warps=4,
    )  # fmt: skip
