"""Routed experts for steps of few rows: each choice by itself, without an index. Of quantised experts on Hopper GPUs
few_rows.cu computes the same.

    gate_up_choices   h = silu(gate x) * (up x), or as LIMIT says                 grid (choices, tiles of MID)
    down_choices      out = sum of w (down h) in the order of a row's choices     grid (rows, tiles of H)

Experts that several rows chose are read as often, and count once: COUNT adds a step's distinct experts to `touched`
int64 []. Of tiles, rows' values are int8 by groups in all products (engine/weights/tiled/dots.py); `W*` are
Matrix.constants, `*_AT` a matrix's place in an expert slot of SIZE bytes. Plain numbers (`plain_*`, SIZE in values)
are multiplied in float32. BIASED, RAW, LIMIT and ALPHA as in kernels.py. LORA: down adds what adapters give, by
`t_down` of lora_kernels.py.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,attr-defined"
from __future__ import annotations

import triton
import triton.language as tl

from engine.experts.gpu.kernels import bias_of
from engine.experts.gpu.lora_kernels import choice_of, choices_of_row, lora_down_choices, put_inner
from engine.weights.tiled.dots import row_products


@triton.jit
def _count(touched, ids, choice, E: tl.constexpr, EP: tl.constexpr):
    """Add one if no choice before has this one's expert. There are no more choices than experts: EP, a power of two
    from E on, covers them."""
    before = tl.arange(0, EP)
    others = tl.load(ids + before, mask=before < choice, other=-1)
    same = tl.sum((others == tl.load(ids + choice)).to(tl.int32), 0)
    if same == 0:
        tl.atomic_add(touched, 1, sem="relaxed")


@triton.jit(do_not_specialize=["touched"])
def gate_up_choices(
    bsz, ids, slots, place, touched, x, expert_slots, h, biases,
    H: tl.constexpr, MID: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    RAW: tl.constexpr, BIASED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    SIZE: tl.constexpr, UP_AT: tl.constexpr,
    WG: tl.constexpr, WU: tl.constexpr, TG: tl.constexpr, TU: tl.constexpr, BN: tl.constexpr, ASSEMBLY: tl.constexpr,
    EP: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    choice = tl.program_id(0)
    row = choice // K
    expert, _, expert_slot = choice_of(bsz, ids, slots, place, choice, K, E)
    if expert_slot < 0:
        return
    if COUNT:  # noqa: SIM102 - a constant of the kernel, and a condition within it
        if tl.program_id(1) == 0:
            _count(touched, ids, choice, E, EP)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    one = tl.arange(0, 1)
    xs = x + row.to(tl.int64) * H + one
    matrix = expert_slots + expert_slot.to(tl.int64) * SIZE
    if WG == WU:
        two = tl.arange(0, 2)
        both = row_products(xs, matrix + two * UP_AT, n, two < 2, WG, 1, 2, BN, TG, ASSEMBLY)
        gate, up = tl.split(tl.trans(both))
    else:
        gate = tl.sum(row_products(xs, matrix + one, n, one < 1, WG, 1, 1, BN, TG, ASSEMBLY), 0)
        up = tl.sum(row_products(xs, matrix + UP_AT + one, n, one < 1, WU, 1, 1, BN, TU, ASSEMBLY), 0)
    if BIASED:
        gate += bias_of(biases, expert, n, 0, H, MID)
        up += bias_of(biases, expert, n, MID, H, MID)
    put_inner(h, gate, up, choice.to(tl.int64), n < MID, n, MID, RAW, LIMIT, ALPHA)


@triton.jit
def down_choices(
    bsz, ids, slots, place, h, weights, expert_slots, out, biases, t_down, address, ranks,
    H: tl.constexpr, MID: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    LORA: tl.constexpr, T: tl.constexpr, SHARES: tl.constexpr, R: tl.constexpr,
    BIASED: tl.constexpr, SIZE: tl.constexpr, DOWN_AT: tl.constexpr,
    WD: tl.constexpr, TD: tl.constexpr, J: tl.constexpr, BN: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """J: a power of two from K on."""
    row = tl.program_id(0)
    if row >= tl.load(bsz):
        return
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    choice, expert, slot, expert_slot = choices_of_row(ids, slots, place, row, K, E, J)
    real = expert_slot >= 0
    hs = h + tl.where(real, choice, row * K).to(tl.int64) * MID
    matrix = expert_slots + tl.where(real, expert_slot, 0).to(tl.int64) * SIZE + DOWN_AT
    sums = row_products(hs, matrix, n, real, WD, J, J, BN, TD, ASSEMBLY)
    if BIASED:
        own = tl.where(real, expert, 0)[:, None]
        sums += tl.load(biases + own * (2 * MID + H) + 2 * MID + n[None, :])
    if LORA:
        sums += lora_down_choices(
            h, t_down, choice, expert, slot, real, address, ranks, n, H, MID, E, T, SHARES, J, R, BN
        )
    weight = tl.load(weights + choice, mask=real, other=0)
    total = tl.sum(tl.where(real[:, None], sums * weight[:, None], 0.0), 0)
    tl.store(out + row.to(tl.int64) * H + n, total.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["touched"])
def plain_gate_up_choices(
    bsz, ids, slots, place, touched, x, expert_slots, h, biases,
    H: tl.constexpr, MID: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    RAW: tl.constexpr, BIASED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SIZE: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EP: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    choice = tl.program_id(0)
    expert, _, expert_slot = choice_of(bsz, ids, slots, place, choice, K, E)
    if expert_slot < 0:
        return
    if COUNT:  # noqa: SIM102 - a constant of the kernel, and a condition within it
        if tl.program_id(1) == 0:
            _count(touched, ids, choice, E, EP)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    xs_at = x + (choice // K).to(tl.int64) * H + k
    gate_at = expert_slots + expert_slot.to(tl.int64) * SIZE + n[:, None] * H + k[None, :]
    gate = tl.zeros([BN, BK], tl.float32)
    up = tl.zeros([BN, BK], tl.float32)
    for at in tl.static_range(0, H, BK):
        xs = tl.load(xs_at + at).to(tl.float32)[None, :]
        gate += tl.load(gate_at + at).to(tl.float32) * xs
        up += tl.load(gate_at + MID * H + at).to(tl.float32) * xs
    gates, ups = tl.sum(gate, 1), tl.sum(up, 1)
    if BIASED:
        gates += bias_of(biases, expert, n, 0, H, MID)
        ups += bias_of(biases, expert, n, MID, H, MID)
    put_inner(h, gates, ups, choice.to(tl.int64), n < MID, n, MID, RAW, LIMIT, ALPHA)


@triton.jit
def plain_down_choices(
    bsz, ids, slots, place, h, weights, expert_slots, out, biases, t_down, address, ranks,
    H: tl.constexpr, MID: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    LORA: tl.constexpr, T: tl.constexpr, SHARES: tl.constexpr, R: tl.constexpr,
    BIASED: tl.constexpr, SIZE: tl.constexpr,
    J: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """J: a power of two from K on."""
    row = tl.program_id(0)
    if row >= tl.load(bsz):
        return
    j = tl.arange(0, J)
    choices, expert, slot, expert_slot = choices_of_row(ids, slots, place, row, K, E, J)
    weight = tl.load(weights + choices, mask=expert_slot >= 0, other=0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    hs_at = h + row.to(tl.int64) * K * MID + k
    down_at = expert_slots + 2 * H * MID + n[:, None] * MID + k[None, :]
    sums = tl.zeros([BN, BK], tl.float32)  # of all choices: one sum over threads, and no load waits for another's
    for choice in tl.static_range(K):
        mine = tl.max(tl.where(j == choice, expert_slot, -1), 0)
        scale = tl.sum(tl.where(j == choice, weight, 0.0), 0)
        for at in tl.static_range(0, MID, BK):
            hs = tl.load(hs_at + choice * MID + at, mask=(mine >= 0) & (k < BK), other=0).to(tl.float32)
            ws = tl.load(down_at + mine.to(tl.int64) * SIZE + at, mask=(mine >= 0) & (n < H)[:, None], other=0)
            sums += ws.to(tl.float32) * (hs * scale)[None, :]
    total = tl.sum(sums, 1)
    if BIASED:  # of all choices, times their weights, which are zero elsewhere
        own = tl.where(expert_slot >= 0, expert, 0)[:, None]
        total += tl.sum(tl.load(biases + own * (2 * MID + H) + 2 * MID + n[None, :]) * weight[:, None], 0)
    if LORA:
        real = expert_slot >= 0
        added = lora_down_choices(
            h, t_down, choices, expert, slot, real, address, ranks, n, H, MID, E, T, SHARES, J, R, BN
        )
        total += tl.sum(added * weight[:, None], 0)
    tl.store(out + row.to(tl.int64) * H + n, total.to(out.dtype.element_ty))
