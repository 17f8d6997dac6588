"""Gated delta nets on a GPU, rows of one token: convolution; decay and rule, which read a state once and write it once;
gated norm.

States are float32 in slots, read and written by index; so is everything that is computed. A table says where rows and
states are, so that the launches can be captured and replayed with other contents. Longer rows: `delta_chunk_kernels`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.architectures.parts.delta import DeltaNet
from engine.attention.delta import DeltaVectors

PART = 32  # of key_dim or value_dim that a program holds at a time
EPS = 1e-6  # beside the squares of a query or key


@dataclass(frozen=True)
class Slots:
    """A layer's: `states` [slots, value_heads, key_dim, value_dim], `past` [slots, kernel - 1, channels], float32."""

    states: torch.Tensor
    past: torch.Tensor


def block_of(dim: int) -> int:
    return int(max(16, triton.next_power_of_2(dim)))


@triton.jit
def head_channels(head, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    """(first channel, width) of the head-th of queries, keys and values."""
    wide = head >= 2 * KEY_HEADS
    keys = tl.minimum(head, 2 * KEY_HEADS)
    return keys * KEY_DIM + (head - keys) * VALUE_DIM, tl.where(wide, VALUE_DIM, KEY_DIM)


@triton.jit
def _place(
    head, first, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SHARED: tl.constexpr,
    FUSED: tl.constexpr,
):  # fmt: skip
    """Where this head begins among a token's inputs; fused, they are (q, k, v, z) by heads of keys."""
    if FUSED:
        group: tl.constexpr = 2 * KEY_DIM + 2 * SHARED * VALUE_DIM
        value = head - 2 * KEY_HEADS
        of_value = value // SHARED * group + 2 * KEY_DIM + value % SHARED * VALUE_DIM
        of_key = head % KEY_HEADS * group + head // KEY_HEADS * KEY_DIM
        return tl.where(value >= 0, of_value, of_key)
    else:
        return first


@triton.jit
def _softplus(x):
    e = tl.exp(tl.minimum(x, 20.0))
    small = e * (1.0 - e * (0.5 - e * (1.0 / 3.0 - 0.25 * e)))
    return tl.where(x > 20.0, x, tl.where(e < 0.01, small, tl.log(1.0 + e)))


@triton.jit
def _convolve_one(
    qkv, stride, table, table_stride, past, conv, mixed, scale,
    KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SHARED: tl.constexpr,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, FUSED: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, heads of queries, keys and values): mixed [rows, channels], and the past moves on by a token."""
    row, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(table + row).to(tl.int64)
    source = tl.load(table + table_stride + row).to(tl.int64)
    slot = tl.load(table + 2 * table_stride + row).to(tl.int64)
    save = tl.load(table + 3 * table_stride + row).to(tl.int64)
    first, width = head_channels(head, KEY_HEADS, KEY_DIM, VALUE_DIM)
    place = _place(head, first, KEY_HEADS, KEY_DIM, VALUE_DIM, SHARED, FUSED)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    channels = first + cols
    begins = source >= 0
    saves = save >= 0
    wide: tl.constexpr = (KERNEL - 1) * CHANNELS
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(KERNEL):
        if j < KERNEL - 1:
            seen = tl.load(past + source * wide + j * CHANNELS + channels, mask & begins, other=0.0)
        else:
            seen = tl.load(qkv + token * stride + place + cols, mask, other=0.0).to(tl.float32)
        total += seen * tl.load(conv + j * CHANNELS + channels, mask, other=0.0)
        if j > 0:  # where the one before was read
            tl.store(past + slot * wide + (j - 1) * CHANNELS + channels, seen, mask)
            tl.store(past + save * wide + (j - 1) * CHANNELS + channels, seen, mask & saves)
    out = total / (1.0 + tl.exp(-total))
    if head < 2 * KEY_HEADS:
        out *= tl.rsqrt(tl.sum(out * out, 0) + EPS) * tl.where(head < KEY_HEADS, scale, 1.0)
    tl.store(mixed + row.to(tl.int64) * CHANNELS + channels, out, mask)


@triton.jit
def _delta_one(
    mixed, b, a, gate_stride, table, table_stride, states, decay, dt_bias, y,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    SHARED: tl.constexpr, CHANNELS: tl.constexpr, FUSED_GATES: tl.constexpr, TILED: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of value_dim, heads of values, rows), so many and small that states are read at the memory's speed:
    y [rows, heads, value_dim]."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = tl.load(table + row).to(tl.int64)
    source = tl.load(table + table_stride + row).to(tl.int64)
    slot = tl.load(table + 2 * table_stride + row).to(tl.int64)
    save = tl.load(table + 3 * table_stride + row).to(tl.int64)
    key_head = head % KEY_HEADS if TILED else head // SHARED
    k_cols, v_cols = tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_mask, v_mask = k_cols < KEY_DIM, v_cols < VALUE_DIM
    cell = head * KEY_DIM * VALUE_DIM + k_cols[:, None] * VALUE_DIM + v_cols[None, :]
    mask = k_mask[:, None] & v_mask[None, :]
    size: tl.constexpr = VALUE_HEADS * KEY_DIM * VALUE_DIM
    s = tl.load(states + source * size + cell, mask & (source >= 0), other=0.0)
    at = mixed + row * CHANNELS + key_head * KEY_DIM + k_cols
    q = tl.load(at, k_mask, other=0.0)
    k = tl.load(at + KEY_HEADS * KEY_DIM, k_mask, other=0.0)
    v = tl.load(mixed + row * CHANNELS + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v_cols, v_mask, other=0.0)
    gate = head
    if FUSED_GATES:  # (b, a) by heads of keys
        gate = head // SHARED * 2 * SHARED + head % SHARED
    rate = 1.0 / (1.0 + tl.exp(-tl.load(b + token * gate_stride + gate)))
    grown = _softplus(tl.load(a + token * gate_stride + gate) + tl.load(dt_bias + head)) * tl.load(decay + head)
    s *= tl.exp(grown)
    change = (v - tl.sum(k[:, None] * s, 0)) * rate
    s += k[:, None] * change[None, :]
    tl.store(states + slot * size + cell, s, mask)
    tl.store(states + save * size + cell, s, mask & (save >= 0))
    tl.store(y + (row * VALUE_HEADS + head) * VALUE_DIM + v_cols, tl.sum(q[:, None] * s, 0), v_mask)


@triton.jit
def _norm_one(
    y, z, z_stride, table, norm, out, eps,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SHARED: tl.constexpr,
    FUSED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (heads of values, rows)."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = tl.load(table + row).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < VALUE_DIM
    value = tl.load(y + (row * VALUE_HEADS + head) * VALUE_DIM + cols, mask, other=0.0)
    value *= tl.rsqrt(tl.sum(value * value, 0) / VALUE_DIM + eps) * tl.load(norm + cols, mask, other=0.0)
    if FUSED:
        place = head // SHARED * (2 * KEY_DIM + 2 * SHARED * VALUE_DIM) + 2 * KEY_DIM
        place += (SHARED + head % SHARED) * VALUE_DIM
    else:
        place = head * VALUE_DIM
    g = tl.load(z + token * z_stride + place + cols, mask, other=0.0).to(tl.float32)
    value *= g / (1.0 + tl.exp(-g))
    tl.store(out + (token * VALUE_HEADS + head) * VALUE_DIM + cols, value.to(out.dtype.element_ty), mask)


def step_one(
    wide: list[torch.Tensor],
    gates: list[torch.Tensor],
    vectors: DeltaVectors,
    spec: DeltaNet,
    slots: Slots,
    table: torch.Tensor,
    rows: int,
    out: torch.Tensor,
) -> None:
    """Rows of one token each. `wide` and `gates` as in `DeltaInputs`; `table` int32 [4, >= rows]: each row's token, the
    slot that it begins from (negative: with nothing), the one that it ends in, and one for a copy (negative: none).
    out [T, value_heads x value_dim] in the dtype of `wide`: the rows' tokens are written."""
    d, key_block, value_block = spec, block_of(spec.key_dim), block_of(spec.value_dim)
    shared = d.value_heads // d.key_heads
    mixed = torch.empty((rows, d.channels), dtype=torch.float32, device=out.device)
    _convolve_one[(rows, 2 * d.key_heads + d.value_heads)](
        wide[0], wide[0].stride(0), table, table.stride(0), slots.past, vectors.conv, mixed, d.key_dim**-0.5,
        KEY_HEADS=d.key_heads, KEY_DIM=d.key_dim, VALUE_DIM=d.value_dim, SHARED=shared, CHANNELS=d.channels,
        KERNEL=d.kernel, FUSED=d.fused, EPS=EPS, BLOCK=max(key_block, value_block), num_warps=1,
    )  # fmt: skip
    a = gates[0][:, shared:] if d.fused_gates else gates[1]
    y = torch.empty((rows, d.value_heads, d.value_dim), dtype=torch.float32, device=out.device)
    _delta_one[(triton.cdiv(d.value_dim, PART), d.value_heads, rows)](
        mixed, gates[0], a, gates[0].stride(0), table, table.stride(0), slots.states, vectors.decay, vectors.dt_bias, y,
        KEY_HEADS=d.key_heads, VALUE_HEADS=d.value_heads, KEY_DIM=d.key_dim, VALUE_DIM=d.value_dim, SHARED=shared,
        CHANNELS=d.channels, FUSED_GATES=d.fused_gates, TILED=d.tiled, BLOCK_K=key_block, BLOCK_V=PART, num_warps=4,
    )  # fmt: skip
    _norm_one[(d.value_heads, rows)](
        y, wide[-1], wide[-1].stride(0), table, vectors.norm, out, vectors.norm_eps,
        VALUE_HEADS=d.value_heads, KEY_DIM=d.key_dim, VALUE_DIM=d.value_dim, SHARED=shared, FUSED=d.fused,
        BLOCK=value_block, num_warps=1,
    )  # fmt: skip
