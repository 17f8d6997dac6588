"""`engine.experts.gpu.index.build` in one launch that visits the true rows only.

A program of each expert counts the choices of all experts, so that it knows where its own begin, and then puts those
into order, one adapter slot after another. A batch has few slots, and most experts have rows of one or two of them.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.experts.gpu.index import Index

NONE = tl.constexpr(1 << 20)  # above every adapter slot
_WARPS = 4
_LEAST_CHUNK, _MOST_CHUNK = 32 * _WARPS, 1024  # choices looked at at a time: one of each thread, or several


@triton.jit
def choices(at, n, ids, slots, place, K: tl.constexpr, E: tl.constexpr):
    """(expert, or E if it is not computed; adapter slot) of choices `at`, of which there are n."""
    row = at // K
    expert = tl.load(ids + at, mask=at < n, other=-1).to(tl.int32)
    inside = expert >= 0
    slot = tl.load(slots + row, mask=inside, other=0)
    expert_slot = tl.load(place + slot * E + expert, mask=inside, other=-1)
    return tl.where(expert_slot >= 0, expert, E), slot


@triton.jit(do_not_specialize=["rows", "touched"])
def index_kernel(
    bsz, rows, ids, slots, place, order, start, block_expert, block_first, num_blocks, touched,
    K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Grid (E,). EP: a power of two above E. `rows`: of the batch at most, whatever bsz says. COUNT: `touched` int64 []
    grows by how many experts have a choice."""
    e = tl.program_id(0)
    n = tl.minimum(tl.load(bsz), rows) * K
    experts = tl.arange(0, EP)
    counts = tl.zeros([EP], tl.int32)
    current = tl.full([], NONE, tl.int32)
    for first in range(0, n, CHUNK):
        expert, slot = choices(first + tl.arange(0, CHUNK), n, ids, slots, place, K, E)
        counts += tl.histogram(expert, EP)
        current = tl.minimum(current, tl.min(tl.where(expert == e, slot, NONE), 0))
    blocks = (counts + STEP - 1) // STEP
    begin = tl.sum(tl.where(experts < e, counts, 0), 0)
    count = tl.sum(tl.where(experts == e, counts, 0), 0)
    first_block = tl.sum(tl.where(experts < e, blocks, 0), 0)
    mine = (count + STEP - 1) // STEP
    tl.store(start + e + 1, begin + count)
    if e == 0:
        tl.store(start, 0)
        if COUNT:
            distinct = tl.sum(((counts > 0) & (experts < E)).to(tl.int64), 0)
            tl.store(touched, tl.load(touched) + distinct)
    if e == E - 1:
        tl.store(num_blocks, first_block + mine)
    for block in range(mine):
        tl.store(block_expert + first_block + block, e)
        tl.store(block_first + first_block + block, begin + block * STEP)
    to = begin
    while current < NONE:
        later = tl.full([], NONE, tl.int32)
        for first in range(0, n, CHUNK):
            at = first + tl.arange(0, CHUNK)
            expert, slot = choices(at, n, ids, slots, place, K, E)
            now = (expert == e) & (slot == current)
            tl.store(order + to + tl.cumsum(now.to(tl.int32), 0) - 1, at, mask=now)
            to += tl.sum(now.to(tl.int32), 0)
            later = tl.minimum(later, tl.min(tl.where((expert == e) & (slot > current), slot, NONE), 0))
        current = later


def launch(
    index: Index,
    bsz: torch.Tensor,
    ids: torch.Tensor,
    slots: torch.Tensor,
    place: torch.Tensor,
    block_rows: int,
    touched: torch.Tensor | None = None,
) -> None:
    """As `build`; any number of choices, though many are slow. `touched` int64 []: grows by how many experts have a
    choice that is computed."""
    rows, top_k = ids.shape
    experts = place.shape[1]
    chunk = min(max(triton.next_power_of_2(rows * top_k), _LEAST_CHUNK), _MOST_CHUNK)
    index_kernel[(experts,)](
        bsz, rows, ids, slots, place, index.order, index.start, index.block_expert, index.block_first, index.num_blocks,
        bsz if touched is None else touched,
        K=top_k, E=experts, EP=triton.next_power_of_2(experts + 1), STEP=block_rows, CHUNK=chunk,
        COUNT=touched is not None, num_warps=_WARPS,
    )  # fmt: skip
