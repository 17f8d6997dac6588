"""Of few rows: the residual's sum, its norm, the router's product, its adapters, softmax and top-k in one launch.

A program normalises one row and multiplies it by a few of the router's rows. The last one of a row to get there finds
the logits complete and chooses the experts; none waits for another. Everything is computed in float32 and rounded
where transformers rounds. More rows are faster in several launches: each program would normalise its row again. Few
adapters have a pair for the router: rows without one cost no more than a look at their rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engine.ops.base import RowAdapters
from engine.ops.gpu_kernels import chosen_experts

FUSED_ROWS = 16
_EACH = 2  # of the router's rows, in a program
_STEP = 16  # rows of A at a time, which divide every rank of a slot table
_BLOCK = 64  # inputs of these at a time


@triton.jit
def _last_one(arrived, parts):
    """Whether all other programs of this row have stored their logits; the count is reset."""
    tl.debug_barrier()  # all that this program has stored, then its mark
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == parts - 1
    if last:
        tl.store(arrived, 0)
    return last


@triton.jit
def _choose(
    logits, weights, ids, EXPERTS: tl.constexpr, K: tl.constexpr, NORMALISE: tl.constexpr,
    E_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one row."""
    cols = tl.arange(0, E_BLOCK)[None, :]
    # not from this processor's own cache, which may hold what was there before
    x = tl.load(logits + cols, cols < EXPERTS, other=float("-inf"), cache_modifier=".cg")
    chosen, index = chosen_experts(x, EXPERTS, K, NORMALISE, E_BLOCK, K_BLOCK)
    places = tl.arange(0, K_BLOCK)[None, :]
    tl.store(weights + places, chosen, places < K)
    tl.store(ids + places, index, places < K)


@triton.jit
def _added(residual, delta, cols, DIM: tl.constexpr):
    """A row's sum, rounded as it is kept."""
    value = tl.load(residual + cols, cols < DIM, other=0.0)
    more = tl.load(delta + cols, cols < DIM, other=0.0)
    return (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)


@triton.jit
def _add_adapter(
    x, logits, slot, a, b, scales, ranks,
    DIM: tl.constexpr, EXPERTS: tl.constexpr, R: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
    E_BLOCK: tl.constexpr,
):  # fmt: skip
    """To the logits of one row, whose norm is x; STEP rows of A at a time."""
    rank = tl.load(ranks + slot)
    if rank > 0:
        k, e = tl.arange(0, BLOCK), tl.arange(0, E_BLOCK)
        scale = tl.load(scales + slot)
        value = tl.load(logits + e, e < EXPERTS, other=0.0, cache_modifier=".cg")
        for first in range(0, rank, STEP):
            r = first + tl.arange(0, STEP)
            rows = a + (slot.to(tl.int64) * R + r[:, None]) * DIM
            sums = tl.zeros([STEP, BLOCK], tl.float32)
            for at in range(0, DIM, BLOCK):
                inside = (at + k < DIM)[None, :]
                xs = tl.load(x + at + k[None, :], inside, other=0.0, cache_modifier=".cg").to(tl.float32)
                sums += tl.load(rows + at + k[None, :], inside, other=0.0) * xs
            columns = b + (slot.to(tl.int64) * EXPERTS + e[:, None]) * R + r[None, :]
            bs = tl.load(columns, (e < EXPERTS)[:, None], other=0.0)
            value += tl.sum(bs * (tl.sum(sums, 1) * scale)[None, :], 1)
        tl.store(logits + e, value, e < EXPERTS)
        tl.debug_barrier()


@triton.jit
def _add_adapters(
    x, logits, slots, a, b, scales, ranks,
    DIM: tl.constexpr, EXPERTS: tl.constexpr, R: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
    E_BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    row_logits = logits + row * EXPERTS
    _add_adapter(x + row * DIM, row_logits, slot, a, b, scales, ranks, DIM, EXPERTS, R, STEP, BLOCK, E_BLOCK)


@triton.jit
def _norm_route(
    residual, delta, gain, x, router, logits, arrived, weights, ids, stride_r, stride_d, eps,
    slots, a, b, scales, ranks,
    DIM: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, NORMALISE: tl.constexpr,
    BE: tl.constexpr, BK: tl.constexpr, E_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
    LORA: tl.constexpr, R: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, parts of EXPERTS)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    residual += row * stride_r
    delta += row * stride_d
    expert = part * BE + tl.arange(0, BE)
    known = (expert < EXPERTS)[:, None]
    k = tl.arange(0, BK)
    place = router + expert[:, None] * DIM + k[None, :]
    w = tl.load(place, known & (k < DIM)[None, :], other=0.0)  # on its way while the row is normalised
    squares = tl.zeros([BK], tl.float32)
    for at in range(0, DIM, BK):
        wide = _added(residual, delta, at + k, DIM).to(tl.float32)
        squares += wide * wide
    scale = tl.rsqrt(tl.sum(squares, 0) / DIM + eps)
    sums = tl.zeros([BE, BK], tl.float32)
    for at in range(0, DIM, BK):
        value = _added(residual, delta, at + k, DIM)
        normed = (value.to(tl.float32) * scale).to(value.dtype).to(tl.float32)
        gains = tl.load(gain + at + k, at + k < DIM, other=0.0).to(tl.float32)
        value = (normed * gains).to(value.dtype)
        tl.store(x + row * DIM + at + k, value, (at + k < DIM) & (part == 0))
        sums += w * value.to(tl.float32)[None, :]
        w = tl.load(place + at + BK, known & (at + BK + k < DIM)[None, :], other=0.0)
    tl.store(logits + row * EXPERTS + expert, tl.sum(sums, 1), expert < EXPERTS)
    if _last_one(arrived + row, tl.num_programs(1)):
        for at in range(0, DIM, BK):  # nobody reads the old residual any more
            tl.store(residual + at + k, _added(residual, delta, at + k, DIM), at + k < DIM)
        if LORA:
            slot, row_logits = tl.load(slots + row), logits + row * EXPERTS
            _add_adapter(x + row * DIM, row_logits, slot, a, b, scales, ranks, DIM, EXPERTS, R, STEP, BLOCK, E_BLOCK)
        _choose(logits + row * EXPERTS, weights + row * K, ids + row * K, EXPERTS, K, NORMALISE, E_BLOCK, K_BLOCK)


class Router:
    """Owns the counts by which programs know the last one. One stream at a time uses an object."""

    def __init__(self, device: torch.device) -> None:
        self._arrived = torch.zeros(FUSED_ROWS, dtype=torch.int32, device=device)  # 0 between launches

    def beside(self) -> Router:
        return Router(self._arrived.device)

    def __call__(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor,
        gain: torch.Tensor,
        eps: float,
        router: torch.Tensor,
        normalise: bool,
        out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        adapters: RowAdapters | None = None,
    ) -> None:
        """T <= FUSED_ROWS. residual [T, H] += delta [T, H] in place; out: its norm [T, H], and of the router float32
        [E, H] and its adapters (float32 as well) on that the weights float32 and ids int64 [T, k],
        all contiguous."""
        x, weights, ids = out
        rows, dim = residual.shape
        experts, top_k = router.shape[0], ids.shape[1]
        if rows > FUSED_ROWS:
            raise ValueError(f"{rows} rows; {FUSED_ROWS} at most")
        logits = torch.empty(rows, experts, dtype=torch.float32, device=x.device)
        tables, rank = _tables(adapters, logits)
        _norm_route[(rows, triton.cdiv(experts, _EACH))](
            residual, delta, gain, x, router, logits, self._arrived, weights, ids,
            residual.stride(0), delta.stride(0), eps, *tables,
            DIM=dim, EXPERTS=experts, K=top_k, NORMALISE=normalise, BE=_EACH,
            BK=min(triton.next_power_of_2(dim), 2048), E_BLOCK=triton.next_power_of_2(experts),
            K_BLOCK=triton.next_power_of_2(top_k), LORA=adapters is not None, R=rank, STEP=_STEP, BLOCK=_BLOCK,
            num_warps=4,
        )  # fmt: skip

    def add_adapters(self, logits: torch.Tensor, x: torch.Tensor, adapters: RowAdapters) -> None:
        """logits float32 [T, E] += what the router's adapters add of x [T, H], in place; all contiguous."""
        rows, experts = logits.shape
        tables, rank = _tables(adapters, logits)
        _add_adapters[(rows,)](
            x, logits, *tables, DIM=x.shape[1], EXPERTS=experts, R=rank, STEP=_STEP, BLOCK=_BLOCK,
            E_BLOCK=triton.next_power_of_2(experts), num_warps=4,
        )  # fmt: skip


def _tables(adapters: RowAdapters | None, stand_in: torch.Tensor) -> tuple[Sequence[torch.Tensor], int]:
    """(slots, a, b, scales, ranks), and how many rows of A a slot has."""
    if adapters is None:
        return [stand_in] * 5, 1
    return (adapters.slots, adapters.a, adapters.b, adapters.scales, adapters.ranks), adapters.a.shape[1]
