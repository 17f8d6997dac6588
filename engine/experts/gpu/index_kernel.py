"""`gpu_index.build` in one launch: program 0 counts and cuts blocks, each other one ranks some choices against all."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

RANKED = 64  # choices of a program
MOST_CHOICES = 4096  # every choice is compared with every other


@triton.jit
def choice_keys(at, bsz, ids, slots, place, N: tl.constexpr, K: tl.constexpr, E: tl.constexpr):
    """(expert, or E if it is not computed; expert * 2^16 + slot) of choices `at`."""
    row = at // K
    inside = (at < N) & (row < bsz)
    expert = tl.load(ids + at, mask=inside, other=-1).to(tl.int32)
    inside = inside & (expert >= 0)
    slot = tl.load(slots + row, mask=inside, other=0)
    frame = tl.load(place + slot * E + expert, mask=inside, other=-1)
    expert = tl.where(frame >= 0, expert, E)
    return expert, expert * 65536 + slot


@triton.jit
def index_kernel(
    bsz_at, ids, slots, place, order, start, block_expert, block_first, num_blocks,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, B: tl.constexpr, STEP: tl.constexpr,
    CHUNK: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    bsz = tl.load(bsz_at)
    if pid == 0:
        experts = tl.arange(0, EP)
        counts = tl.zeros([EP], tl.int32)
        for first in range(0, N, CHUNK):
            expert, _ = choice_keys(first + tl.arange(0, CHUNK), bsz, ids, slots, place, N, K, E)
            counts += tl.sum((expert[:, None] == experts[None, :]).to(tl.int32), 0)
        counts = tl.where(experts < E, counts, 0)
        ends = tl.cumsum(counts, 0)
        tl.store(start + experts + 1, ends, mask=experts < E)
        tl.store(start, 0)
        blocks = (counts + STEP - 1) // STEP
        block_ends = tl.cumsum(blocks, 0)
        tl.store(num_blocks, tl.sum(blocks, 0))
        for first in range(0, B, CHUNK):
            block = first + tl.arange(0, CHUNK)
            before = block_ends[None, :] <= block[:, None]
            of = tl.sum(before.to(tl.int32), 0 + 1)
            mine = experts[None, :] == of[:, None]
            begins = tl.sum(tl.where(mine, (ends - counts)[None, :], 0), 1)
            skipped = tl.sum(tl.where(mine, (block_ends - blocks)[None, :], 0), 1)
            tl.store(block_expert + block, of, mask=block < B)
            tl.store(block_first + block, begins + (block - skipped) * STEP, mask=block < B)
    else:
        mine = (pid - 1) * RANK + tl.arange(0, RANK)
        expert, key = choice_keys(mine, bsz, ids, slots, place, N, K, E)
        rank = tl.zeros([RANK], tl.int32)
        for first in range(0, N, CHUNK):
            at = first + tl.arange(0, CHUNK)
            _, other = choice_keys(at, bsz, ids, slots, place, N, K, E)
            less = (other[None, :] < key[:, None]) | ((other[None, :] == key[:, None]) & (at[None, :] < mine[:, None]))
            rank += tl.sum((less & (at < N)[None, :]).to(tl.int32), 1)
        tl.store(order + rank, mine, mask=(mine < N) & (expert < E))
