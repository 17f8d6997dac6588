"""What adapters add to routed experts: y += B t, where t = s A x of each choice.

Of larger blocks, within their products (kernels.py):

    lora_a          t, in matrix instructions                              grid (blocks, 16-row tiles of A)
    with_lora_*     B t, one adapter of a block after another

Of few rows, whose choices hardly share an adapter in an expert, beside the products, which know nothing of adapters:

    lora_a_choices  t of gate and up                                       grid (choices, 16-row tiles of A)
    activate        h = silu(gate + B t) * (up + B t), and t of down       grid (choices, tiles of MID)
    combine_lora    out = sum of w (y + B t) in the order of a row's choices         grid (rows, tiles of H)

There t of down is a sum over tiles of MID, which whoever reads it adds up: t_down float32 [N, SHARES, R]. What few rows
cost is loads that wait for others, so a kernel asks for all that it can name at once.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

NONE = tl.constexpr(1 << 20)  # above every adapter slot


@triton.jit
def numbers_at(address, like):
    """The values of `like`'s type at an address, or at each of [J]. An adapter's part lies at a multiple of 16 bytes,
    as all its rows do: without that being said, loads are of two bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def block_of(b, order, start, block_expert, block_first, K: tl.constexpr, BM: tl.constexpr):
    """(expert, which rows of a block are real, their choices)."""
    e = tl.load(block_expert + b)
    position = tl.load(block_first + b) + tl.arange(0, BM)
    real = position < tl.load(start + e + 1)
    return e, real, tl.load(order + position, mask=real, other=0)


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
def put_inner(
    h, gate, up, at, mask, n,
    MID: tl.constexpr, RAW: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
):  # fmt: skip
    """Into rows `at` of h [N, MID]; RAW: gate and up themselves, float32 [N, 2 MID], for `activate`."""
    if RAW:
        tl.store(h + at * (2 * MID) + n, gate, mask=mask)
        tl.store(h + at * (2 * MID) + MID + n, up, mask=mask)
    else:
        tl.store(h + at * MID + n, activated(gate, up, LIMIT, ALPHA).to(h.dtype.element_ty), mask=mask)


# ---- larger blocks ----


@triton.jit
def adapter_slots(slots, choice, real, e, address, K: tl.constexpr, E: tl.constexpr):
    """The slot of each row that has LoRA in this expert, NONE for others."""
    slot = tl.load(slots + choice // K, mask=real, other=0)
    has = tl.load(address + slot * E + e, mask=real & (slot > 0), other=0) != 0
    return tl.where(has, slot, NONE)


@triton.jit
def lora_a(
    x, t, slots, order, start, block_expert, block_first, num_blocks, address, ranks, scales,
    H: tl.constexpr, MID: tl.constexpr, K: tl.constexpr, E: tl.constexpr, T: tl.constexpr, DOWN: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS = 16 rows of A at a time: gate's, then up's, of x [M, H]; DOWN: of h [N, MID]. t float32 [N, T]."""
    b = tl.program_id(0)
    if b >= tl.load(num_blocks):
        return
    tile = tl.program_id(1)
    e, real, choice = block_of(b, order, start, block_expert, block_first, K, BM)
    slot = adapter_slots(slots, choice, real, e, address, K, E)
    INNER: tl.constexpr = MID if DOWN else H
    row = choice.to(tl.int64) if DOWN else (choice // K).to(tl.int64)
    at_k = tl.arange(0, BK)
    out = tile * ROWS + tl.arange(0, ROWS)
    current = tl.min(slot, 0)
    while current < NONE:
        rank = tl.multiple_of(tl.load(ranks + current), 16)
        if tile * ROWS < (rank if DOWN else 2 * rank):
            a = numbers_at(tl.load(address + current * E + e), x)
            if DOWN:
                a += 2 * rank * H
            sums = tl.zeros([BM, ROWS], tl.float32)
            for k in range(0, INNER, BK):
                xs = tl.load(x + row[:, None] * INNER + k + at_k[None, :], mask=real[:, None], other=0)
                rows = tl.load(a + out[:, None] * INNER + k + at_k[None, :])
                sums = tl.dot(xs, tl.trans(rows), sums, input_precision="ieee")
            if DOWN:
                scale = tl.load(scales + current * 3 + 2)
            else:
                scale = tl.load(scales + current * 3 + tl.where(tile * ROWS < rank, 0, 1))
            to = t + choice[:, None].to(tl.int64) * T + out[None, :]
            tl.store(to, sums * scale, mask=(slot == current)[:, None])
        current = tl.min(tl.where(slot > current, slot, NONE), 0)


@triton.jit
def lora_b(sums, t, t_first, b_at, rank, choice, mine, n, T: tl.constexpr, R: tl.constexpr):
    """sums [BM, BN] += t [BM, rank] B[n, :]^T for the rows `mine`."""
    at = tl.arange(0, R)
    for r in range(0, rank, R):
        bs = tl.load(b_at + n[:, None] * rank + r + at[None, :])
        ts = tl.load(t + choice[:, None].to(tl.int64) * T + t_first + r + at[None, :], mask=mine[:, None], other=0)
        sums = tl.dot(ts.to(bs.dtype), tl.trans(bs), sums, input_precision="ieee")
    return sums


@triton.jit
def with_lora_gate_up(
    gate, up, slot, x, t, choice, e, address, ranks, n,
    H: tl.constexpr, MID: tl.constexpr, E: tl.constexpr, T: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """gate, up [BM, BN] and what the rows' adapters add, one adapter after another. slot [BM]: NONE without one;
    adapters are of x's type."""
    current = tl.min(slot, 0)
    while current < NONE:
        rank = tl.multiple_of(tl.load(ranks + current), 16)
        b = numbers_at(tl.load(address + current * E + e), x) + rank * (2 * H + MID)
        gate = lora_b(gate, t, 0, b, rank, choice, slot == current, n, T, R)
        up = lora_b(up, t, rank, b + rank * MID, rank, choice, slot == current, n, T, R)
        current = tl.min(tl.where(slot > current, slot, NONE), 0)
    return gate, up


@triton.jit
def with_lora_down(
    sums, slot, h, t, choice, e, address, ranks, n,
    H: tl.constexpr, MID: tl.constexpr, E: tl.constexpr, T: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The same of down, whose adapters are of h's type."""
    current = tl.min(slot, 0)
    while current < NONE:
        rank = tl.multiple_of(tl.load(ranks + current), 16)
        b = numbers_at(tl.load(address + current * E + e), h) + rank * (2 * H + 3 * MID)
        sums = lora_b(sums, t, 0, b, rank, choice, slot == current, n, T, R)
        current = tl.min(tl.where(slot > current, slot, NONE), 0)
    return sums


# ---- few rows ----


@triton.jit
def choice_of(bsz, ids, slots, place, choice, K: tl.constexpr, E: tl.constexpr):
    """(a choice's expert, its row's adapter slot, the expert's slot: -1 if it is not computed here)."""
    row = choice // K
    rows, expert, slot = tl.load(bsz), tl.load(ids + choice), tl.load(slots + row)
    return expert, slot, tl.load(place + slot * E + expert, mask=(row < rows) & (expert >= 0), other=-1)


@triton.jit
def choices_of_row(ids, slots, place, row, K: tl.constexpr, E: tl.constexpr, J: tl.constexpr):
    """(a row's choices [J], their experts, the row's adapter slot, the experts' slots: -1 if not computed here). J: a
    power of two from K on."""
    j = tl.arange(0, J)
    choice = row * K + j
    expert = tl.load(ids + choice, mask=j < K, other=-1)
    slot = tl.load(slots + row)
    return choice, expert, slot, tl.load(place + slot * E + expert, mask=expert >= 0, other=-1)


@triton.jit
def adapter_of(bsz, ids, slots, address, ranks, choice, K: tl.constexpr, E: tl.constexpr):
    """(a choice's adapter slot, the adapter's rank and address in the choice's expert; 0, 0 without one)."""
    row = choice // K
    rows, expert, slot = tl.load(bsz), tl.load(ids + choice), tl.load(slots + row)
    real = (row < rows) & (expert >= 0) & (slot > 0)
    rank = tl.multiple_of(tl.load(ranks + slot, mask=real, other=0), 16)
    return slot, rank, tl.load(address + slot * E + expert, mask=real, other=0)


@triton.jit
def lora_a_choices(
    x, t, bsz, ids, slots, address, ranks, scales,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, T: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    choice, first = tl.program_id(0), tl.program_id(1) * ROWS
    slot, rank, lora_at = adapter_of(bsz, ids, slots, address, ranks, choice, K, E)
    if (lora_at != 0) & (first < 2 * rank):
        scale = tl.load(scales + slot * 3 + tl.where(first < rank, 0, 1))
        out = first + tl.arange(0, ROWS)
        at_k = tl.arange(0, BK)
        x_at = x + (choice // K).to(tl.int64) * H + at_k
        a = numbers_at(lora_at, x) + out[:, None] * H + at_k[None, :]
        sums = tl.zeros([ROWS, BK], tl.float32)
        for k in tl.static_range(0, H, BK):
            sums += tl.load(a + k).to(tl.float32) * tl.load(x_at + k).to(tl.float32)[None, :]
        tl.store(t + choice.to(tl.int64) * T + out, tl.sum(sums, 1) * scale)


@triton.jit
def activate(
    raw, h, t, t_down, bsz, ids, slots, address, ranks, scales,
    H: tl.constexpr, MID: tl.constexpr, K: tl.constexpr, E: tl.constexpr, T: tl.constexpr, SHARES: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """raw float32 [N, 2 MID], what gate and up gave; of choices that are not computed here it is nothing."""
    choice, share = tl.program_id(0), tl.program_id(1)
    n = share * BN + tl.arange(0, BN)
    inside = n < MID
    at = tl.arange(0, R)
    raw_at = raw + choice.to(tl.int64) * (2 * MID) + n
    gate, up = tl.load(raw_at, mask=inside, other=0), tl.load(raw_at + MID, mask=inside, other=0)
    slot, rank, lora_at = adapter_of(bsz, ids, slots, address, ranks, choice, K, E)
    scale = tl.load(scales + slot * 3 + 2, mask=rank > 0, other=0)
    rank = tl.multiple_of(tl.where(lora_at == 0, 0, rank), 16)
    a = numbers_at(lora_at, h) + rank * (2 * H)
    gate_b = a + rank * MID + n[:, None] * rank + at[None, :]
    t_at = t + choice.to(tl.int64) * T + at
    for r in range(0, rank, R):
        gate_bs = tl.load(gate_b + r, mask=inside[:, None], other=0).to(tl.float32)
        up_bs = tl.load(gate_b + rank * MID + r, mask=inside[:, None], other=0).to(tl.float32)
        gate += tl.sum(gate_bs * tl.load(t_at + r)[None, :], 1)
        up += tl.sum(up_bs * tl.load(t_at + rank + r)[None, :], 1)
    inner = activated(gate, up, LIMIT, ALPHA).to(h.dtype.element_ty)
    tl.store(h + choice.to(tl.int64) * MID + n, inner, mask=inside)
    wide = tl.where(inside, inner, 0).to(tl.float32)
    down_at = t_down + (choice.to(tl.int64) * SHARES + share) * (T // 2) + at
    for r in range(0, rank, R):
        rows = tl.load(a + (r + at)[:, None] * MID + n[None, :], mask=inside[None, :], other=0).to(tl.float32)
        tl.store(down_at + r, tl.sum(rows * wide[None, :], 1) * scale)


@triton.jit
def lora_down_choices(
    h, t_down, choice, expert, slot, real, address, ranks, n,
    H: tl.constexpr, MID: tl.constexpr, E: tl.constexpr, T: tl.constexpr, SHARES: tl.constexpr, J: tl.constexpr,
    R: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """float32 [J, BN]: what a row's adapter adds to down of its choices [J], 0 where it has nothing. h: of its type."""
    rank = tl.multiple_of(tl.load(ranks + slot, mask=slot > 0, other=0), 16)
    lora_at = tl.load(address + slot * E + expert, mask=real & (slot > 0), other=0)
    has = lora_at != 0
    b = numbers_at(lora_at, h) + rank * (2 * H + 3 * MID)
    added = tl.zeros([J, BN], tl.float32)
    for r in range(0, rank, R):
        at = r + tl.arange(0, R)
        ts = tl.zeros([J, R], tl.float32)
        for share in tl.static_range(SHARES):
            t_at = t_down + (choice.to(tl.int64) * SHARES + share)[:, None] * (T // 2) + at[None, :]
            ts += tl.load(t_at, mask=has[:, None], other=0)
        b_at = b[:, None, None] + n[None, :, None] * rank + at[None, None, :]
        bs = tl.load(b_at, mask=has[:, None, None], other=0).to(tl.float32)
        added += tl.sum(bs * ts[:, None, :], 2)
    return added


@triton.jit
def combine_lora(
    bsz, ids, slots, place, h, y, t_down, weights, address, ranks, out,
    H: tl.constexpr, MID: tl.constexpr, K: tl.constexpr, E: tl.constexpr, T: tl.constexpr, SHARES: tl.constexpr,
    J: tl.constexpr, R: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """y [N, H], times weights [M, K] already."""
    row = tl.program_id(0)
    if row >= tl.load(bsz):
        return
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    choice, expert, slot, expert_slot = choices_of_row(ids, slots, place, row, K, E, J)
    real = expert_slot >= 0
    inside = real[:, None] & (n < H)[None, :]
    sums = tl.load(y + choice.to(tl.int64)[:, None] * H + n[None, :], mask=inside, other=0)
    weight = tl.load(weights + choice, mask=real, other=0)
    added = lora_down_choices(
        h, t_down, choice, expert, slot, real, address, ranks, tl.minimum(n, H - 1), H, MID, E, T, SHARES, J, R, BN
    )
    total = tl.sum(sums + added * weight[:, None], 0)
    tl.store(out + row.to(tl.int64) * H + n, total.to(out.dtype.element_ty), mask=n < H)
