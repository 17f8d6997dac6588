"""Grouped matrix products of routed experts, each row with its own adapter inside, as Triton kernels.

    lora_a    t = s A x per choice with an adapter (lora_kernels.py)
    gate_up   h = silu(gate x + Bg t) * (up x + Bu t), or as LIMIT says          grid (tiles of MID, blocks)
    lora_a    t = s A h
    down      y = w (down h + Bd t), one row per choice, float32 or H's type     grid (tiles of H, blocks)
    combine   out = sum of a row's y in the order of its choices

Few rows have their adapters beside these products: gate_up gives what `activate` of lora_kernels.py needs (RAW).

A block is up to BM choices of one expert (index.py); within it the adapters are visited one after another, so base
weights are read once for all of them, and a block of base rows does no LoRA work. Blocks that the batch does not
have, and those of experts that are not in `place`, end at once. The tiles of a block run beside one another, so that
its rows are read from memory once, not once for each tile. Sums run in one order whatever the other rows are.
Layouts: layout.py; SIZE is an expert slot's, in values. BIASED: each product has a bias, float32 [E, 2 MID + H].
Experts that are quantised here have products of their own (tiled_kernels.py).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from engine.experts.gpu.lora_kernels import adapter_slots, block_of, put_inner, with_lora_down, with_lora_gate_up


@triton.jit
def bias_of(biases, e, n, FIRST: tl.constexpr, H: tl.constexpr, MID: tl.constexpr):
    """float32 [BN] of expert e: of gate (FIRST is 0), up (MID) or down (2 MID), of its rows n."""
    return tl.load(biases + e * (2 * MID + H) + FIRST + n)


@triton.jit
def gate_up(
    x, expert_slots, place, h, t, biases, slots, order, start, block_expert, block_first, num_blocks, address,
    ranks,
    H: tl.constexpr, MID: tl.constexpr, K: tl.constexpr, E: tl.constexpr, T: tl.constexpr, LORA: tl.constexpr,
    RAW: tl.constexpr, BIASED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SIZE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    if b >= tl.load(num_blocks):
        return
    expert_slot = tl.load(place + tl.load(block_expert + b)).to(tl.int64)
    if expert_slot < 0:
        return
    e, real, choice = block_of(b, order, start, block_expert, block_first, K, BM)
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
        gate, up = with_lora_gate_up(gate, up, slot, x, t, choice, e, address, ranks, n, H, MID, E, T, R)
    put_inner(h, gate, up, choice[:, None].to(tl.int64), real[:, None], n[None, :], MID, RAW, LIMIT, ALPHA)


@triton.jit
def down(
    h, expert_slots, place, y, t, weights, biases, slots, order, start, block_expert, block_first, num_blocks,
    address, ranks,
    H: tl.constexpr, MID: tl.constexpr, K: tl.constexpr, E: tl.constexpr, T: tl.constexpr, LORA: tl.constexpr,
    BIASED: tl.constexpr, SIZE: tl.constexpr, DOWN_AT: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    if b >= tl.load(num_blocks):
        return
    expert_slot = tl.load(place + tl.load(block_expert + b)).to(tl.int64)
    if expert_slot < 0:
        return
    e, real, choice = block_of(b, order, start, block_expert, block_first, K, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    at_k = tl.arange(0, BK)
    hs_at = h + choice[:, None].to(tl.int64) * MID + at_k[None, :]
    down_at = expert_slots + expert_slot * SIZE + DOWN_AT + n[:, None] * MID + at_k[None, :]
    sums = tl.zeros([BM, BN], tl.float32)
    for k in range(0, MID, BK):
        hs = tl.load(hs_at + k, mask=real[:, None], other=0)
        sums = tl.dot(hs, tl.trans(tl.load(down_at + k)), sums, input_precision="ieee")
    if BIASED:
        sums += bias_of(biases, e, n, 2 * MID, H, MID)[None, :]
    if LORA:
        slot = adapter_slots(slots, choice, real, e, address, K, E)
        sums = with_lora_down(sums, slot, h, t, choice, e, address, ranks, n, H, MID, E, T, R)
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
