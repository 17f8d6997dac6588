"""Routed experts whose matrices lie in tiles (engine/weights/tiled): the products of kernels.py with packed weights.

    gate_up, down                 blocks of rows of an expert, in matrix instructions
    gate_up_rows, down_rows       the same one row after another: for steps whose experts have hardly more than one

Rows one after another have no adapters within (LORA). `W*` are Matrix.constants, `*_AT` a matrix's place in an expert
slot of SIZE bytes.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,attr-defined"
from __future__ import annotations

import triton
import triton.language as tl

from engine.experts.gpu.kernels import bias_of
from engine.experts.gpu.lora_kernels import adapter_slots, block_of, put_inner, with_lora_down, with_lora_gate_up
from engine.weights.tiled.dots import row_products
from engine.weights.tiled.kernels import product, vector


@triton.jit
def gate_up(
    x, expert_slots, place, h, t, biases, slots, order, start, block_expert, block_first, num_blocks, address,
    ranks,
    H: tl.constexpr, MID: tl.constexpr, K: tl.constexpr, E: tl.constexpr, T: tl.constexpr, LORA: tl.constexpr,
    RAW: tl.constexpr, BIASED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, WG: tl.constexpr,
    WU: tl.constexpr, SIZE: tl.constexpr, UP_AT: tl.constexpr, TOGETHER: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, R: tl.constexpr, FAST: tl.constexpr, STEP: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """TOGETHER: gate and up are of one form."""
    b = tl.program_id(0)
    if b >= tl.load(num_blocks):
        return
    e, real, choice = block_of(b, order, start, block_expert, block_first, K, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    weights = expert_slots + tl.load(place + e).to(tl.int64) * SIZE
    xs = x + (choice // K).to(tl.int64)[:, None] * H
    if TOGETHER:  # columns of gate and up in turn, so that a row's values are read once
        column = tl.arange(0, 2 * BN)
        row = tl.program_id(1) * BN + column // 2
        both = product(xs, real, weights + column % 2 * UP_AT, row, WG, BM, 2 * BN, FAST, STEP, FIRST)
        gate, up = tl.split(tl.reshape(both, [BM, BN, 2]))
    else:
        gate = product(xs, real, weights, n, WG, BM, BN, FAST, STEP, FIRST)
        up = product(xs, real, weights + UP_AT, n, WU, BM, BN, FAST, STEP, FIRST)
    if BIASED:
        gate += bias_of(biases, e, n, 0, H, MID)[None, :]
        up += bias_of(biases, e, n, MID, H, MID)[None, :]
    if LORA:
        slot = adapter_slots(slots, choice, real, e, address, K, E)
        gate, up = with_lora_gate_up(gate, up, slot, x, t, choice, e, address, ranks, n, H, MID, E, T, R)
    put_inner(h, gate, up, choice[:, None].to(tl.int64), real[:, None], n[None, :], MID, RAW, LIMIT, ALPHA)


@triton.jit
def down(
    h, expert_slots, place, y, t, weights, biases, slots, order, start, block_expert, block_first, num_blocks,
    address, ranks,
    H: tl.constexpr, MID: tl.constexpr, K: tl.constexpr, E: tl.constexpr, T: tl.constexpr, LORA: tl.constexpr,
    BIASED: tl.constexpr, WD: tl.constexpr, SIZE: tl.constexpr, DOWN_AT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, FAST: tl.constexpr, STEP: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    if b >= tl.load(num_blocks):
        return
    e, real, choice = block_of(b, order, start, block_expert, block_first, K, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    matrix = expert_slots + tl.load(place + e).to(tl.int64) * SIZE + DOWN_AT
    sums = product(h + choice.to(tl.int64)[:, None] * MID, real, matrix, n, WD, BM, BN, FAST, STEP, FIRST)
    if BIASED:
        sums += bias_of(biases, e, n, 2 * MID, H, MID)[None, :]
    if LORA:
        slot = adapter_slots(slots, choice, real, e, address, K, E)
        sums = with_lora_down(sums, slot, h, t, choice, e, address, ranks, n, H, MID, E, T, R)
    weight = tl.load(weights + choice, mask=real, other=0)
    tl.store(y + choice[:, None].to(tl.int64) * H + n[None, :], sums * weight[:, None], mask=real[:, None])


@triton.jit
def one_row(x, w, n, W: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, FAST: tl.constexpr):
    """float32 [BN], of a matrix whose quants are integers in integers if FAST."""
    if FAST and W[3] < 16 and W[17] != 4:
        one = tl.arange(0, 1)
        return tl.sum(row_products(x + one, w + one, n, one < 1, W, 1, 1, BN, TILES, True), 0)
    return vector(x, w, n, W, BN, TILES)


@triton.jit
def gate_up_rows(
    x, expert_slots, place, h, t, biases, slots, order, start, block_expert, block_first, num_blocks, address,
    ranks,
    H: tl.constexpr, MID: tl.constexpr, K: tl.constexpr, E: tl.constexpr, T: tl.constexpr, LORA: tl.constexpr,
    RAW: tl.constexpr, BIASED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, WG: tl.constexpr,
    WU: tl.constexpr, SIZE: tl.constexpr, UP_AT: tl.constexpr, TG: tl.constexpr, TU: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, R: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    if b >= tl.load(num_blocks):
        return
    e = tl.load(block_expert + b)
    tl.static_assert(not LORA, "rows one after another have no adapters within")
    first = tl.load(block_first + b)
    last = tl.minimum(first + BM, tl.load(start + e + 1))
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    weights = expert_slots + tl.load(place + e).to(tl.int64) * SIZE
    for position in range(first, last):
        choice = tl.load(order + position)
        x_at = x + (choice // K).to(tl.int64) * H
        gate = one_row(x_at, weights, n, WG, BN, TG, FAST)
        up = one_row(x_at, weights + UP_AT, n, WU, BN, TU, FAST)
        if BIASED:
            gate += bias_of(biases, e, n, 0, H, MID)
            up += bias_of(biases, e, n, MID, H, MID)
        put_inner(h, gate, up, choice.to(tl.int64), n < MID, n, MID, RAW, LIMIT, ALPHA)


@triton.jit
def down_rows(
    h, expert_slots, place, y, t, weights, biases, slots, order, start, block_expert, block_first, num_blocks,
    address, ranks,
    H: tl.constexpr, MID: tl.constexpr, K: tl.constexpr, E: tl.constexpr, T: tl.constexpr, LORA: tl.constexpr,
    BIASED: tl.constexpr, WD: tl.constexpr, SIZE: tl.constexpr, DOWN_AT: tl.constexpr,
    TD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    if b >= tl.load(num_blocks):
        return
    e = tl.load(block_expert + b)
    tl.static_assert(not LORA, "rows one after another have no adapters within")
    first = tl.load(block_first + b)
    last = tl.minimum(first + BM, tl.load(start + e + 1))
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    matrix = expert_slots + tl.load(place + e).to(tl.int64) * SIZE + DOWN_AT
    for position in range(first, last):
        choice = tl.load(order + position)
        sums = one_row(h + choice.to(tl.int64) * MID, matrix, n, WD, BN, TD, FAST)
        if BIASED:
            sums += bias_of(biases, e, n, 2 * MID, H, MID)
        tl.store(y + choice.to(tl.int64) * H + n, sums * tl.load(weights + choice))
