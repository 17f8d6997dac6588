"""Gated delta nets on a GPU, rows of several tokens: chunks of up to 64 positions.

What a chunk's tokens write solves a triangular system, all chunks at once; then each row goes from chunk to chunk by
products. A state is read where a row begins, and written where it ends and where a copy is wanted.

Everything is computed in float32. Products are of three TF32 parts: nearly as exact, on tensor cores.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.architectures.parts.delta import DeltaNet
from engine.attention.delta import CHUNK, DeltaVectors
from engine.attention.delta_kernels import EPS, PART, Slots, block_of, head_channels

_PRECISION = "tf32x3"


@dataclass(frozen=True)
class Chunks:
    """What longer rows are computed in. `chunks` int32 [5, >= count]: of each its first token, how many it has (0: it
    is there for a copy), its row's place in `rows`, a slot for a copy of the state behind it, and the place of its
    first token's result; `rows` int32 [7, >= num_rows]: of each its first chunk, how many, the slot that it begins
    from, the one that its state ends in, its first token, the slot of its own, in which the inputs of its last
    positions are kept, and the token before which those end. Negative: none. A row's tokens follow one another."""

    chunks: torch.Tensor
    count: int
    rows: torch.Tensor
    num_rows: int


@triton.jit
def _convolve_chunks(
    qkv, stride, chunks, chunks_stride, rows, rows_stride, past, conv, mixed, scale,
    KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr, EPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, heads of queries, keys and values): mixed [T, channels]."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(chunks + chunk).to(tl.int64)
    length = tl.load(chunks + chunks_stride + chunk)
    row = tl.load(chunks + 2 * chunks_stride + chunk)
    source = tl.load(rows + 2 * rows_stride + row).to(tl.int64)
    of_row = tl.load(rows + 4 * rows_stride + row).to(tl.int64)
    first, width = head_channels(head, KEY_HEADS, KEY_DIM, VALUE_DIM)
    i, cols = tl.arange(0, CHUNK)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (i < length) & (cols < width)
    channels = first + cols
    total = tl.zeros([CHUNK, BLOCK], tl.float32)
    for j in tl.static_range(KERNEL):
        token = begin + i - (KERNEL - 1) + j
        own = token >= of_row
        seen = tl.load(qkv + token * stride + channels, inside & own, other=0.0).to(tl.float32)
        behind = past + (source * (KERNEL - 1) + KERNEL - 1 + token - of_row) * CHANNELS + channels
        seen += tl.load(behind, inside & (token < of_row) & (source >= 0), other=0.0)
        total += seen * tl.load(conv + j * CHANNELS + channels, cols < width, other=0.0)
    out = total / (1.0 + tl.exp(-total))
    if head < 2 * KEY_HEADS:
        length_of = tl.rsqrt(tl.sum(out * out, 1) + EPS) * tl.where(head < KEY_HEADS, scale, 1.0)
        out *= length_of[:, None]
    tl.store(mixed + (begin + i) * CHANNELS + channels, out, inside)


@triton.jit
def _put_past(
    qkv, stride, past, source, slot, of_row, end, channels, mask, CHANNELS: tl.constexpr, KERNEL: tl.constexpr
):
    """The inputs before token `end`. From the earliest on: where the row began is read before it is written to."""
    for j in tl.static_range(KERNEL - 1):
        token = end - (KERNEL - 1) + j
        own = token >= of_row
        seen = tl.load(qkv + token * stride + channels, mask & own, other=0.0).to(tl.float32)
        behind = past + (source * (KERNEL - 1) + KERNEL - 1 + token - of_row) * CHANNELS + channels
        seen += tl.load(behind, mask & (token < of_row) & (source >= 0), other=0.0)
        tl.store(past + (slot * (KERNEL - 1) + j) * CHANNELS + channels, seen, mask)


@triton.jit
def _keep_past(
    qkv, stride, chunks, chunks_stride, rows, rows_stride, past,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of channels): after the convolution, which reads where this writes."""
    row = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < CHANNELS
    first, count = tl.load(rows + row), tl.load(rows + rows_stride + row)
    source = tl.load(rows + 2 * rows_stride + row).to(tl.int64)
    of_row = tl.load(rows + 4 * rows_stride + row).to(tl.int64)
    own = tl.load(rows + 5 * rows_stride + row).to(tl.int64)
    for chunk in range(first, first + count):
        save = tl.load(chunks + 3 * chunks_stride + chunk).to(tl.int64)
        if (save >= 0) & (save != own):
            end = tl.load(chunks + chunk).to(tl.int64) + tl.load(chunks + chunks_stride + chunk)
            _put_past(qkv, stride, past, source, save, of_row, end, channels, mask, CHANNELS, KERNEL)
    last = tl.load(rows + 6 * rows_stride + row).to(tl.int64)
    _put_past(qkv, stride, past, source, own, of_row, last, channels, mask, CHANNELS, KERNEL)


@triton.jit
def _sums(decay, begin, head, i, length, VALUE_HEADS: tl.constexpr):
    """[CHUNK]: of decays from the chunk's beginning to each token."""
    return tl.cumsum(tl.load(decay + (begin + i) * VALUE_HEADS + head, i < length, other=0.0), 0)


@triton.jit
def _solve_chunks(
    mixed, decay, rate, chunks, chunks_stride, known, grown, scores,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    SHARED: tl.constexpr, CHANNELS: tl.constexpr, TILED: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, heads of values). A^-1 of the unit triangle A of `delta_chunks`, and with it known [T, heads,
    value_dim] = A^-1 (rate v) and grown [T, heads, key_dim] = A^-1 (rate exp(G) k), which is to meet the state; scores
    [chunks, heads, CHUNK, CHUNK] = (q.k) exp(G_i - G_j), lower half."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = tl.load(chunks + chunk).to(tl.int64)
    length = tl.load(chunks + chunks_stride + chunk)
    key_head = head % KEY_HEADS if TILED else head // SHARED
    i, j = tl.arange(0, CHUNK), tl.arange(0, CHUNK)
    cols = tl.arange(0, PART)[None, :]
    live = i < length
    sums = _sums(decay, begin, head, i, length, VALUE_HEADS)
    beta = tl.load(rate + (begin + i) * VALUE_HEADS + head, live, other=0.0)
    at = mixed + (begin + i[:, None]) * CHANNELS
    at_k = at + (KEY_HEADS + key_head) * KEY_DIM + cols
    of_queries = tl.zeros([CHUNK, CHUNK], tl.float32)
    of_keys = tl.zeros([CHUNK, CHUNK], tl.float32)
    for part in range(0, KEY_DIM, PART):
        mask = live[:, None] & (part + cols < KEY_DIM)
        k = tl.load(at_k + part, mask, other=0.0)
        q = tl.load(at + key_head * KEY_DIM + part + cols, mask, other=0.0)
        of_queries += tl.dot(q, tl.trans(k), input_precision=PRECISION)
        of_keys += tl.dot(k, tl.trans(k), input_precision=PRECISION)

    lower = i[:, None] >= j[None, :]
    between = tl.where(lower, tl.exp(tl.where(lower, sums[:, None] - sums[None, :], 0.0)), 0.0)
    place = ((chunk * VALUE_HEADS + head) * CHUNK + i[:, None]) * CHUNK + j[None, :]
    tl.store(scores + place, of_queries * between)

    # the triangle below the diagonal, on its side: [j, i] is how token i depends on j
    earlier = i[:, None] < j[None, :]
    aside = tl.where(earlier, tl.exp(tl.where(earlier, sums[None, :] - sums[:, None], 0.0)), 0.0)
    aside = of_keys * aside * beta[None, :]
    inverse = tl.where(i[:, None] == j[None, :], 1.0, 0.0)
    for token in range(1, length):
        on_others = tl.sum(tl.where(j[None, :] == token, aside, 0.0), 1)
        through = tl.sum(on_others[:, None] * inverse, 0)
        inverse -= tl.where(i[:, None] == token, through[None, :], 0.0)

    grow = (beta * tl.exp(sums))[:, None]
    for part in range(0, KEY_DIM, PART):
        mask = live[:, None] & (part + cols < KEY_DIM)
        found = tl.dot(inverse, tl.load(at_k + part, mask, other=0.0) * grow, input_precision=PRECISION)
        tl.store(grown + ((begin + i[:, None]) * VALUE_HEADS + head) * KEY_DIM + part + cols, found, mask)
    for part in range(0, VALUE_DIM, PART):
        mask = live[:, None] & (part + cols < VALUE_DIM)
        v = tl.load(at + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + part + cols, mask, other=0.0)
        found = tl.dot(inverse, v * beta[:, None], input_precision=PRECISION)
        tl.store(known + ((begin + i[:, None]) * VALUE_HEADS + head) * VALUE_DIM + part + cols, found, mask)


@triton.jit
def _run_rows(
    mixed, decay, known, grown, scores, chunks, chunks_stride, rows, rows_stride, states, out,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    SHARED: tl.constexpr, CHANNELS: tl.constexpr, TILED: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Grid (rows, heads of values, blocks of value_dim): out [T, heads, value_dim]."""
    row, head = tl.program_id(0), tl.program_id(1)
    key_head = head % KEY_HEADS if TILED else head // SHARED
    i, j = tl.arange(0, CHUNK), tl.arange(0, CHUNK)
    k_rows, k_cols = tl.arange(0, BLOCK_K)[:, None], tl.arange(0, BLOCK_K)[None, :]
    v_cols = (tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V))[None, :]
    first, count = tl.load(rows + row), tl.load(rows + rows_stride + row)
    source = tl.load(rows + 2 * rows_stride + row).to(tl.int64)
    slot = tl.load(rows + 3 * rows_stride + row).to(tl.int64)
    cell = head * KEY_DIM * VALUE_DIM + k_rows * VALUE_DIM + v_cols
    cells = (k_rows < KEY_DIM) & (v_cols < VALUE_DIM)
    size: tl.constexpr = VALUE_HEADS * KEY_DIM * VALUE_DIM
    s = tl.load(states + source * size + cell, cells & (source >= 0), other=0.0)
    for chunk in range(first, first + count):
        begin = tl.load(chunks + chunk).to(tl.int64)
        length = tl.load(chunks + chunks_stride + chunk)
        live = i < length
        sums = _sums(decay, begin, head, i, length, VALUE_HEADS)
        last = tl.sum(tl.where(i == CHUNK - 1, sums, 0.0), 0)
        k_mask, v_mask = live[:, None] & (k_cols < KEY_DIM), live[:, None] & (v_cols < VALUE_DIM)
        at = mixed + (begin + i[:, None]) * CHANNELS + key_head * KEY_DIM + k_cols
        at_values = ((begin + i[:, None]) * VALUE_HEADS + head) * VALUE_DIM + v_cols
        grow = tl.load(grown + ((begin + i[:, None]) * VALUE_HEADS + head) * KEY_DIM + k_cols, k_mask, other=0.0)
        written = tl.load(known + at_values, v_mask, other=0.0) - tl.dot(grow, s, input_precision=PRECISION)
        q = tl.load(at, k_mask, other=0.0) * tl.exp(sums)[:, None]
        place = ((chunk * VALUE_HEADS + head).to(tl.int64) * CHUNK + i[:, None]) * CHUNK + j[None, :]
        y = tl.dot(tl.load(scores + place), written, input_precision=PRECISION)
        y += tl.dot(q, s, input_precision=PRECISION)
        tl.store(out + at_values, y, v_mask)
        k = tl.load(at + KEY_HEADS * KEY_DIM, k_mask, other=0.0) * tl.exp(last - sums)[:, None]
        s = s * tl.exp(last) + tl.dot(tl.trans(k), written, input_precision=PRECISION)
        save = tl.load(chunks + 3 * chunks_stride + chunk).to(tl.int64)
        tl.store(states + save * size + cell, s, cells & (save >= 0))
    tl.store(states + slot * size + cell, s, cells & (slot >= 0))


@triton.jit
def _gated_norm(
    y, z, z_stride, norm, chunks, chunks_stride, out, eps,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, heads of values)."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(chunks + chunk).to(tl.int64)
    length = tl.load(chunks + chunks_stride + chunk)
    target = tl.load(chunks + 4 * chunks_stride + chunk).to(tl.int64)
    if target < 0:
        return
    i, cols = tl.arange(0, CHUNK)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = (i < length) & (cols < VALUE_DIM)
    value = tl.load(y + ((begin + i) * VALUE_HEADS + head) * VALUE_DIM + cols, mask, other=0.0)
    gain = tl.load(norm + cols, cols < VALUE_DIM, other=0.0)
    value *= tl.rsqrt(tl.sum(value * value, 1) / VALUE_DIM + eps)[:, None] * gain
    g = tl.load(z + (target + i) * z_stride + head * VALUE_DIM + cols, mask, other=0.0).to(tl.float32)
    value *= g / (1.0 + tl.exp(-g))
    place = out + ((target + i) * VALUE_HEADS + head) * VALUE_DIM + cols
    tl.store(place, value.to(out.dtype.element_ty), mask)


def run_rows(
    qkv: torch.Tensor,
    z: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    vectors: DeltaVectors,
    spec: DeltaNet,
    slots: Slots,
    held: Chunks,
    out: torch.Tensor,
) -> None:
    """qkv [N, channels], decay and rate float32 [N, value_heads], contiguous: by token; z [T, value_heads x value_dim]
    and out, of which the chunks' results are written: by place."""
    d, device, key_block, value_block = spec, out.device, block_of(spec.key_dim), block_of(spec.value_dim)
    shared, tokens, heads = d.value_heads // d.key_heads, len(qkv), d.value_heads
    tables = held.chunks, held.chunks.stride(0), held.rows, held.rows.stride(0)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    mixed = empty(tokens, d.channels)
    _convolve_chunks[(held.count, 2 * d.key_heads + heads)](
        qkv, qkv.stride(0), *tables, slots.past, vectors.conv, mixed, d.key_dim**-0.5,
        KEY_HEADS=d.key_heads, KEY_DIM=d.key_dim, VALUE_DIM=d.value_dim, CHANNELS=d.channels, KERNEL=d.kernel, EPS=EPS,
        CHUNK=CHUNK, BLOCK=max(key_block, value_block), num_warps=8,
    )  # fmt: skip
    _keep_past[(held.num_rows, triton.cdiv(d.channels, 128))](
        qkv, qkv.stride(0), *tables, slots.past, CHANNELS=d.channels, KERNEL=d.kernel, BLOCK=128, num_warps=1,
    )  # fmt: skip
    known, grown = empty(tokens, heads, d.value_dim), empty(tokens, heads, d.key_dim)
    scores = empty(held.count, heads, CHUNK, CHUNK)
    _solve_chunks[(held.count, heads)](
        mixed, decay, rate, held.chunks, held.chunks.stride(0), known, grown, scores,
        KEY_HEADS=d.key_heads, VALUE_HEADS=heads, KEY_DIM=d.key_dim, VALUE_DIM=d.value_dim, SHARED=shared,
        CHANNELS=d.channels, TILED=d.tiled, PRECISION=_PRECISION, CHUNK=CHUNK, PART=PART, num_warps=4, num_stages=1,
    )  # fmt: skip
    y = empty(tokens, heads, d.value_dim)
    _run_rows[(held.num_rows, heads, triton.cdiv(d.value_dim, PART))](
        mixed, decay, known, grown, scores, *tables, slots.states, y,
        KEY_HEADS=d.key_heads, VALUE_HEADS=heads, KEY_DIM=d.key_dim, VALUE_DIM=d.value_dim, SHARED=shared,
        CHANNELS=d.channels, TILED=d.tiled, PRECISION=_PRECISION, CHUNK=CHUNK, BLOCK_K=key_block, BLOCK_V=PART,
        num_warps=4, num_stages=1,
    )  # fmt: skip
    _gated_norm[(held.count, heads)](
        y, z, z.stride(0), vectors.norm, held.chunks, held.chunks.stride(0), out, vectors.norm_eps,
        VALUE_HEADS=heads, VALUE_DIM=d.value_dim, CHUNK=CHUNK, BLOCK=value_block, num_warps=4,
    )  # fmt: skip
