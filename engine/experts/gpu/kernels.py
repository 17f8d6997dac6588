"""Grouped matrix products of routed experts, each row with its own adapter inside, as Triton kernels.

    lora_a    t = s A x per choice with an adapter                    grid (blocks, 16-row tiles of A, shares of K)
    gate_up   h = silu(gate x + Bg t) * (up x + Bu t), or as LIMIT says          grid (tiles of MID, blocks)
    lora_a    t = s A h
    down      y = w (down h + Bd t), one row per choice, float32 or H's type     grid (tiles of H, blocks)
    combine   out = sum of a row's y in the order of its choices

A block is up to BM choices of one expert (index.py); within it the adapters are visited one after another, so base
weights are read once for all of them, and a block of base rows does no LoRA work. Blocks that the batch does not
have, and those of experts that are not in `place`, end at once. The tiles of a block run beside one another, so that
its rows are read from memory once, not once for each tile. Sums run in one order whatever the other rows are. In few
rows t is SHARES sums, `t_share` values from one to the next, which whoever reads it adds up: one program for all of K
would wait longer for it than the base's product takes.
Layouts: layout.py; SIZE is an expert slot's, in values. BIASED: each product has a bias, float32 [E, 2 MID + H].
Experts that are quantised here have products of their own (tiled_kernels.py).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

NONE = tl.constexpr(1 << 20)  # above every adapter slot


@triton.jit
def block_of(b, order, start, block_expert, block_first, K: tl.constexpr, BM: tl.constexpr):
    """(expert, positions [BM], which of them are real, their choices)."""
    e = tl.load(block_expert + b)
    position = tl.load(block_first + b) + tl.arange(0, BM)
    real = position < tl.load(start + e + 1)
    return e, position, real, tl.load(order + position, mask=real, other=0)


@triton.jit
def bias_of(biases, e, n, FIRST: tl.constexpr, H: tl.constexpr, MID: tl.constexpr):
    """float32 [BN] of expert e: of gate (FIRST is 0), up (MID) or down (2 MID), of its rows n."""
    return tl.load(biases + e * (2 * MID + H) + FIRST + n)


@triton.jit
def activated(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """silu(gate) up; with a LIMIT from 0 on `Activation` of engine/architectures/parts/mlp.py. NaN stays NaN."""
    if LIMIT >= 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        inner = gate * tl.sigmoid(ALPHA * gate) * (up + 1.0)
    else:
        inner = gate * tl.sigmoid(gate) * up
    return inner


@triton.jit
def adapter_slots(slots, choice, real, e, address, K: tl.constexpr, E: tl.constexpr):
    """The slot of each row that has LoRA in this expert, NONE for others."""
    slot = tl.load(slots + choice // K, mask=real, other=0)
    has = tl.load(address + slot * E + e, mask=real & (slot > 0), other=0) != 0
    return tl.where(has, slot, NONE)


@triton.jit
def lora_a(
    x, t, t_share, slots, order, start, block_expert, block_first, num_blocks, address, ranks, scales,
    H: tl.constexpr, MID: tl.constexpr, K: tl.constexpr, E: tl.constexpr, T: tl.constexpr, DOWN: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """ROWS = 16 rows of A at a time: gate's, then up's, of x [M, H]; DOWN: of h [N, MID] by position. t float32."""
    b = tl.program_id(0)
    if b >= tl.load(num_blocks):
        return
    tile = tl.program_id(1)
    e, position, real, choice = block_of(b, order, start, block_expert, block_first, K, BM)
    slot = adapter_slots(slots, choice, real, e, address, K, E)
    INNER: tl.constexpr = MID if DOWN else H
    LENGTH: tl.constexpr = INNER // SHARES
    begin = tl.program_id(2) * LENGTH
    row = position.to(tl.int64) if DOWN else (choice // K).to(tl.int64)
    at_k = tl.arange(0, BK)
    out = tile * ROWS + tl.arange(0, ROWS)
    current = tl.min(slot, 0)
    while current < NONE:
        rank = tl.load(ranks + current)
        if tile * ROWS < (rank if DOWN else 2 * rank):
            a = tl.load(address + current * E + e).to(tl.pointer_type(x.dtype.element_ty))
            if DOWN:
                a += 2 * rank * H
            sums = tl.zeros([BM, ROWS], tl.float32)
            for k in range(0, LENGTH, BK):
                at = begin + k + at_k[None, :]
                xs = tl.load(x + row[:, None] * INNER + at, mask=real[:, None], other=0)
                rows = tl.load(a + out[:, None] * INNER + at)
                sums = tl.dot(xs, tl.trans(rows), sums, input_precision="ieee")
            if DOWN:
                scale = tl.load(scales + current * 3 + 2)
            else:
                scale = tl.load(scales + current * 3 + tl.where(tile * ROWS < rank, 0, 1))
            to = t + tl.program_id(2) * t_share + position[:, None].to(tl.int64) * T + out[None, :]
            tl.store(to, sums * scale, mask=(slot == current)[:, None])
        current = tl.min(tl.where(slot > current, slot, NONE), 0)


@triton.jit
def shares_of(t_at, t_share, mask, SHARES: tl.constexpr):
    """float32: the sum of what shares of K gave."""
    ts = tl.load(t_at, mask=mask, other=0)
    for share in tl.static_range(1, SHARES):
        ts += tl.load(t_at + share * t_share, mask=mask, other=0)
    return ts


@triton.jit
def lora_b(
    sums, t, t_share, t_first, b_at, rank, position, mine, n, T: tl.constexpr, R: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """sums [BM, BN] += t [BM, rank] B[n, :]^T for the rows `mine`."""
    at = tl.arange(0, R)
    for r in range(0, rank, R):
        bs = tl.load(b_at + n[:, None] * rank + r + at[None, :])
        t_at = t + position[:, None].to(tl.int64) * T + t_first + r + at[None, :]
        ts = shares_of(t_at, t_share, mine[:, None], SHARES).to(bs.dtype)
        sums = tl.dot(ts, tl.trans(bs), sums, input_precision="ieee")
    return sums


@triton.jit
def with_lora_gate_up(
    gate, up, slot, x, t, t_share, position, e, address, ranks, n, H: tl.constexpr, MID: tl.constexpr,
    E: tl.constexpr, T: tl.constexpr, R: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """gate, up [BM, BN] and what the rows' adapters add, one adapter after another. slot [BM]: NONE without one;
    adapters are of x's type."""
    numbers = tl.pointer_type(x.dtype.element_ty)
    current = tl.min(slot, 0)
    while current < NONE:
        rank = tl.load(ranks + current)
        b = tl.load(address + current * E + e).to(numbers) + rank * (2 * H + MID)
        gate = lora_b(gate, t, t_share, 0, b, rank, position, slot == current, n, T, R, SHARES)
        up = lora_b(up, t, t_share, rank, b + rank * MID, rank, position, slot == current, n, T, R, SHARES)
        current = tl.min(tl.where(slot > current, slot, NONE), 0)
    return gate, up


@triton.jit
def with_lora_down(
    sums, slot, h, t, t_share, position, e, address, ranks, n, H: tl.constexpr, MID: tl.constexpr, E: tl.constexpr,
    T: tl.constexpr, R: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """The same of down, whose adapters are of h's type."""
    numbers = tl.pointer_type(h.dtype.element_ty)
    current = tl.min(slot, 0)
    while current < NONE:
        rank = tl.load(ranks + current)
        b = tl.load(address + current * E + e).to(numbers) + rank * (2 * H + 3 * MID)
        sums = lora_b(sums, t, t_share, 0, b, rank, position, slot == current, n, T, R, SHARES)
        current = tl.min(tl.where(slot > current, slot, NONE), 0)
    return sums


@triton.jit
def gate_up(
    x, expert_slots, place, h, t, t_share, biases, slots, order, start, block_expert, block_first, num_blocks, address,
    ranks,
    H: tl.constexpr, MID: tl.constexpr, K: tl.constexpr, E: tl.constexpr, T: tl.constexpr, LORA: tl.constexpr,
    SHARES: tl.constexpr, BIASED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SIZE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    if b >= tl.load(num_blocks):
        return
    expert_slot = tl.load(place + tl.load(block_expert + b)).to(tl.int64)
    if expert_slot < 0:
        return
    e, position, real, choice = block_of(b, order, start, block_expert, block_first, K, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    at_k = tl.arange(0, BK)
    row = (choice // K).to(tl.int64)
    weights = expert_slots + expert_slot * SIZE
    xs_at = x + row[:, None] * H + at_k[None, :]
    gate_at = weights + n[:, None] * H + at_k[None, :]
    gate = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    for k in range(0, H, BK):
        xs = tl.load(xs_at + k, mask=real[:, None], other=0)
        gate = tl.dot(xs, tl.trans(tl.load(gate_at + k)), gate, input_precision="ieee")
        up = tl.dot(xs, tl.trans(tl.load(gate_at + H * MID + k)), up, input_precision="ieee")
    if BIASED:
        gate += bias_of(biases, e, n, 0, H, MID)[None, :]
        up += bias_of(biases, e, n, MID, H, MID)[None, :]
    if LORA:
        slot = adapter_slots(slots, choice, real, e, address, K, E)
        gate, up = with_lora_gate_up(
            gate, up, slot, x, t, t_share, position, e, address, ranks, n, H, MID, E, T, R, SHARES
        )
    inner = activated(gate, up, LIMIT, ALPHA)
    tl.store(h + position[:, None].to(tl.int64) * MID + n[None, :], inner.to(h.dtype.element_ty), mask=real[:, None])


@triton.jit
def down(
    h, expert_slots, place, y, t, t_share, weights, biases, slots, order, start, block_expert, block_first, num_blocks,
    address, ranks,
    H: tl.constexpr, MID: tl.constexpr, K: tl.constexpr, E: tl.constexpr, T: tl.constexpr, LORA: tl.constexpr,
    SHARES: tl.constexpr, BIASED: tl.constexpr, SIZE: tl.constexpr, DOWN_AT: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    if b >= tl.load(num_blocks):
        return
    expert_slot = tl.load(place + tl.load(block_expert + b)).to(tl.int64)
    if expert_slot < 0:
        return
    e, position, real, choice = block_of(b, order, start, block_expert, block_first, K, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    at_k = tl.arange(0, BK)
    hs_at = h + position[:, None].to(tl.int64) * MID + at_k[None, :]
    down_at = expert_slots + expert_slot * SIZE + DOWN_AT + n[:, None] * MID + at_k[None, :]
    sums = tl.zeros([BM, BN], tl.float32)
    for k in range(0, MID, BK):
        hs = tl.load(hs_at + k, mask=real[:, None], other=0)
        sums = tl.dot(hs, tl.trans(tl.load(down_at + k)), sums, input_precision="ieee")
    if BIASED:
        sums += bias_of(biases, e, n, 2 * MID, H, MID)[None, :]
    if LORA:
        slot = adapter_slots(slots, choice, real, e, address, K, E)
        sums = with_lora_down(sums, slot, h, t, t_share, position, e, address, ranks, n, H, MID, E, T, R, SHARES)
    weight = tl.load(weights + choice, mask=real, other=0)
    tl.store(y + choice[:, None].to(tl.int64) * H + n[None, :], sums * weight[:, None], mask=real[:, None])


@triton.jit
def combine(
    bsz, ids, slots, place, y, out, H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(bsz):
        return
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place += tl.load(slots + row) * E
    sums = tl.zeros([BLOCK], tl.float32)
    for j in range(K):
        expert = tl.load(ids + row * K + j)
        expert_slot = tl.load(place + expert, mask=expert >= 0, other=-1)
        sums += tl.load(y + (row * K + j) * H + n, mask=(n < H) & (expert_slot >= 0), other=0).to(tl.float32)
    tl.store(out + row * H + n, sums.to(out.dtype.element_ty), mask=n < H)
