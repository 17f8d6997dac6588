"""The sum of all ranks' numbers in one kernel that writes to the other GPUs' memory; Triton.

A cell is 8 bytes: 4 of numbers, and the number of the sum they belong to. It is written at once, so that who reads a
cell knows whether it has come, without a flag and an order of its own. Program j of every rank deals with block j of
what is summed, whatever its shape:

    rank 0, program j   block j -> rank 1's cells (page n % 2, from 0, block j)      wait for rank 1's in ours, add
    rank 1, program j   block j -> rank 0's cells (page n % 2, from 1, block j)      wait for rank 0's in ours, add

Two pages are enough: a rank writes its n-th block after it has seen the others' (n - 1)-th, which they wrote when their
(n - 2)-th sum had ended. n is counted by each program on the device, so that graphs can hold these kernels.

Cells are written through (.wt) and read as volatile, which makes both accesses of 8 bytes that are strong at system
scope (ST and LD .64.STRONG.SYS on Hopper): nothing is held back, nothing comes from a cache.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

LOOKS = tl.constexpr(256)  # a fraction of a millisecond


@triton.jit
def _cells_of(table, rank):
    return tl.load(table + rank).to(tl.pointer_type(tl.int64))


@triton.jit
def _missing(seen, inside, n):
    return tl.sum((inside & ((seen >> 32).to(tl.int32) != n)).to(tl.int32), 0)


@triton.jit
def _halves(word, WIDE: tl.constexpr):
    """A word's numbers in float32: the one there is, or the two bf16 of it."""
    if WIDE:
        return word.to(tl.float32, bitcast=True), tl.zeros_like(word).to(tl.float32)
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _word(low, high, WIDE: tl.constexpr):
    if WIDE:
        return low.to(tl.int32, bitcast=True)
    below = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return below | (high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def sum_kernel(
    x, table, counts, missed, told, words, polls,
    RANK: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """x, int32 [words], in place; `table` int64 [SIZE]: where each rank's cells are. The order of addition is that of
    ranks, on all of them. What has not come after `polls` looks makes the sum NaN; `missed` and `told`, int32 [1] for
    the device and for the host, are 1 from then on, and no sum waits any more: ranks are no longer at the same one. The
    host may set `told` itself, which ends those that wait."""
    j = tl.program_id(0)
    at = j * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    n = tl.load(counts + j) + 1
    polls = tl.where(tl.load(missed) != 0, 0, polls)
    own = tl.load(x + at, inside, other=0)
    cell = (n.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    page = (n & 1) * SIZE
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            tl.store(_cells_of(table, peer) + (page + RANK) * CAPACITY + at, cell, inside, cache_modifier=".wt")
    tl.debug_barrier()  # sent, before anything is waited for
    here = _cells_of(table, RANK)
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(SIZE):
        word = own
        if peer != RANK:
            place = here + (page + peer) * CAPACITY + at
            seen = tl.load(place, inside, other=0, volatile=True)
            missing = _missing(seen, inside, n)
            looks = 0
            while (missing > 0) & (looks < polls):
                seen = tl.load(place, inside, other=0, volatile=True)
                missing = _missing(seen, inside, n)
                looks += 1
                if looks % LOOKS == 0:
                    polls = tl.where(tl.load(told, volatile=True) != 0, 0, polls)
            if missing > 0:
                tl.store(missed, 1)
                tl.store(told, 1)
            word = seen.to(tl.int32)
            low = tl.where(missing > 0, float("nan"), low)
            high = tl.where(missing > 0, float("nan"), high)
        first, second = _halves(word, WIDE)
        low += first
        high += second
    tl.store(x + at, _word(low, high, WIDE), inside)
    tl.debug_barrier()  # all threads have read the count
    tl.store(counts + j, n)
