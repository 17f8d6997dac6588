"""Norms, rotation, routing and KV writes: one launch each, any row count.

Computed in float32 and rounded where transformers rounds. Rows may be strided; dimensions are contiguous.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _add_rms_norm(x, delta, weight, out, stride_x, stride_d, dim, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < dim
    value = tl.load(x + row * stride_x + cols, mask, other=0.0)
    dtype = value.dtype
    if HAS_DELTA:
        added = tl.load(delta + row * stride_d + cols, mask, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(dtype)
        tl.store(x + row * stride_x + cols, value, mask)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / dim + eps)
    normed = (wide * scale).to(dtype).to(tl.float32)
    gain = tl.load(weight + cols, mask, other=0.0).to(tl.float32)
    tl.store(out + row * dim + cols, (normed * gain).to(dtype), mask)


def add_rms_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> torch.Tensor:
    """residual [T, H] += delta in place; its norm goes to out [T, H], contiguous, which is also returned."""
    rows, dim = residual.shape
    added = residual if delta is None else delta
    block = triton.next_power_of_2(dim)
    _add_rms_norm[(rows,)](
        residual,
        added,
        weight,
        out,
        residual.stride(0),
        added.stride(0),
        dim,
        eps,
        HAS_DELTA=delta is not None,
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 16),
    )
    return out


@triton.jit
def _kept(value, LARGEST: tl.constexpr, NARROW: tl.constexpr):
    """As a narrow cache holds it: cut to its largest number; NaN stays NaN."""
    if NARROW:
        value = tl.clamp(value.to(tl.float32), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return value


@triton.jit
def _qk_norm_rope(
    q, k, v, q_out, k_out, keys, values, slots, q_weight, k_weight, cos, sin, positions,
    q_stride, k_stride, v_stride, heads, kv_heads, eps,
    NORM: tl.constexpr, KEEP: tl.constexpr, NARROW: tl.constexpr, LARGEST: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, heads of q and k; with KEEP those of v too, and keys and values go to their slots)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < HALF
    if KEEP:
        slot = tl.load(slots + token) * kv_heads
        if head >= heads + kv_heads:
            given = v + token * v_stride + (head - heads - kv_heads) * 2 * HALF
            place = values + (slot + head - heads - kv_heads) * 2 * HALF
            for half in tl.static_range(2):
                value = _kept(tl.load(given + half * HALF + cols, mask, other=0.0), LARGEST, NARROW)
                tl.store(place + half * HALF + cols, value.to(values.dtype.element_ty), mask)
            return
    if head < heads:
        source = q + token * q_stride + head * 2 * HALF
        weight = q_weight
    else:
        source = k + token * k_stride + (head - heads) * 2 * HALF
        weight = k_weight
    first = tl.load(source + cols, mask, other=0.0)
    second = tl.load(source + HALF + cols, mask, other=0.0)
    dtype = first.dtype
    a, b = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / (2 * HALF) + eps)
        gain_a = tl.load(weight + cols, mask, other=0.0).to(tl.float32)
        gain_b = tl.load(weight + HALF + cols, mask, other=0.0).to(tl.float32)
        a = ((a * scale).to(dtype).to(tl.float32) * gain_a).to(dtype).to(tl.float32)
        b = ((b * scale).to(dtype).to(tl.float32) * gain_b).to(dtype).to(tl.float32)
    position = tl.load(positions + token)
    c = tl.load(cos + position * HALF + cols, mask, other=0.0)
    s = tl.load(sin + position * HALF + cols, mask, other=0.0)
    first, second = (a * c - b * s).to(dtype), (b * c + a * s).to(dtype)
    if head < heads:
        target = q_out + (token * heads + head) * 2 * HALF
        tl.store(target + cols, first, mask)
        tl.store(target + HALF + cols, second, mask)
    elif KEEP:
        key = keys + (slot + head - heads) * 2 * HALF
        tl.store(key + cols, _kept(first, LARGEST, NARROW).to(keys.dtype.element_ty), mask)
        tl.store(key + HALF + cols, _kept(second, LARGEST, NARROW).to(keys.dtype.element_ty), mask)
    else:
        target = k_out + (token * kv_heads + head - heads) * 2 * HALF
        tl.store(target + cols, first, mask)
        tl.store(target + HALF + cols, second, mask)


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, H, D], k [T, G, D], positions int64 [T]; cos, sin float32 [len, D / 2]. Without weights there is
    no norm. Returns contiguous tensors."""
    tokens, heads, dim = q.shape
    kv_heads, half = k.shape[1], dim // 2
    q_out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    k_out = torch.empty((tokens, kv_heads, dim), dtype=k.dtype, device=k.device)
    _qk_norm_rope[(tokens, heads + kv_heads)](
        q, k, k, q_out, k_out, k, k, positions, cos if q_weight is None else q_weight,
        cos if k_weight is None else k_weight, cos, sin, positions, q.stride(0), k.stride(0), 0, heads, kv_heads, eps,
        NORM=q_weight is not None, KEEP=False, NARROW=False, LARGEST=0.0, HALF=half,
        BLOCK=triton.next_power_of_2(half), num_warps=1,
    )  # fmt: skip
    return q_out, k_out


def qk_norm_rope_keep(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """`qk_norm_rope` and `write_kv` of what comes out, v as it is, in one launch. Returns q, contiguous."""
    tokens, heads, dim = q.shape
    kv_heads, half = k.shape[1], dim // 2
    q_out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    _qk_norm_rope[(tokens, heads + 2 * kv_heads)](
        q, k, v, q_out, q_out, keys, values, slots, cos if q_weight is None else q_weight,
        cos if k_weight is None else k_weight, cos, sin, positions, q.stride(0), k.stride(0), v.stride(0), heads,
        kv_heads, eps,
        NORM=q_weight is not None, KEEP=True, NARROW=keys.dtype.itemsize == 1, LARGEST=torch.finfo(keys.dtype).max,
        HALF=half, BLOCK=triton.next_power_of_2(half), num_warps=1,
    )  # fmt: skip
    return q_out


@triton.jit
def _write_kv(
    keys, values, k, v, slots, k_stride, v_stride, dim,
    NARROW: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < dim
    slot = tl.load(slots + token)
    key = _kept(tl.load(k + token * k_stride + cols, mask, other=0.0), LARGEST, NARROW)
    value = _kept(tl.load(v + token * v_stride + cols, mask, other=0.0), LARGEST, NARROW)
    tl.store(keys + slot * dim + cols, key.to(keys.dtype.element_ty), mask)
    tl.store(values + slot * dim + cols, value.to(values.dtype.element_ty), mask)


def write_kv(keys: torch.Tensor, values: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """k, v [T, G, D] into keys, values [blocks, 16, G, D] at slots int64 [T], rounded to their type (fp8: cut to its
    largest number)."""
    tokens, dim = k.shape[0], k.shape[1] * k.shape[2]
    _write_kv[(tokens,)](
        keys, values, k, v, slots, k.stride(0), v.stride(0), dim,
        NARROW=keys.dtype.itemsize == 1, LARGEST=torch.finfo(keys.dtype).max,
        BLOCK=triton.next_power_of_2(dim), num_warps=2,
    )  # fmt: skip


@triton.jit
def _share_with_sinks(
    out, sums, sinks, heads, DIM: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mask = head < heads
    above = tl.load(sums + token * heads + head, mask, other=0.0) - 1.4426950408889634 * tl.load(sinks + head, mask)
    share = 1.0 / (1.0 + tl.exp2(-above))
    cols = tl.arange(0, BLOCK)
    place = out + (token * heads + head)[:, None] * DIM + cols[None, :]
    inside = mask[:, None] & (cols < DIM)[None, :]
    value = tl.load(place, inside, other=0.0)
    tl.store(place, (value.to(tl.float32) * share[:, None]).to(value.dtype), inside)


def share_with_sinks(out: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor) -> None:
    """out [T, H, D], contiguous, of attention without sinks becomes that with them, in place. sums float32 [T, H]:
    log2 of the sum of exp(score); sinks float32 [H]: a score of each head that takes its share and gives nothing."""
    tokens, heads, dim = out.shape
    block = triton.next_power_of_2(dim)
    each = max(1, 1024 // block)
    _share_with_sinks[(tokens, triton.cdiv(heads, each))](
        out, sums, sinks, heads, DIM=dim, HEADS=each, BLOCK=block, num_warps=2
    )


@triton.jit
def _silu_mul(gate, up, out, gate_stride, up_stride, dim, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < dim
    g = tl.load(gate + row * gate_stride + cols, mask, other=0.0)
    u = tl.load(up + row * up_stride + cols, mask, other=0.0).to(tl.float32)
    wide = g.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(g.dtype).to(tl.float32)
    tl.store(out + row * dim + cols, (silu * u).to(g.dtype), mask)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[T, N] each -> [T, N]."""
    rows, dim = gate.shape
    out = torch.empty((rows, dim), dtype=gate.dtype, device=gate.device)
    _silu_mul[(rows, triton.cdiv(dim, 1024))](gate, up, out, gate.stride(0), up.stride(0), dim, BLOCK=1024)
    return out


@triton.jit
def _add_gated(base, x, gate, out, base_stride, x_stride, dim, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < dim
    share = 1.0 / (1.0 + tl.exp(-tl.load(gate + row)))
    held = tl.load(base + row * base_stride + cols, mask, other=0.0)
    added = tl.load(x + row * x_stride + cols, mask, other=0.0).to(tl.float32)
    tl.store(out + row * dim + cols, (held.to(tl.float32) + share * added).to(held.dtype), mask)


def add_gated(base: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """base, x [T, N], gate float32 [T, 1], contiguous -> base + sigmoid(gate) x [T, N]."""
    rows, dim = base.shape
    out = torch.empty((rows, dim), dtype=base.dtype, device=base.device)
    _add_gated[(rows, triton.cdiv(dim, 1024))](base, x, gate, out, base.stride(0), x.stride(0), dim, BLOCK=1024)
    return out


@triton.jit
def chosen_experts(
    x, EXPERTS: tl.constexpr, K: tl.constexpr, NORMALISE: tl.constexpr, BLOCK: tl.constexpr, K_BLOCK: tl.constexpr
):  # fmt: skip
    """Of logits x [rows, BLOCK], -inf from EXPERTS on: the weights and ids [rows, K_BLOCK] of the top K."""
    cols = tl.arange(0, BLOCK)[None, :]
    places = tl.arange(0, K_BLOCK)[None, :]
    e = tl.exp(x - tl.max(x, 1)[:, None])
    p = tl.where(cols < EXPERTS, e / tl.sum(e, 1)[:, None], -1.0)
    chosen = tl.zeros([x.shape[0], K_BLOCK], tl.float32)
    index = tl.zeros([x.shape[0], K_BLOCK], tl.int64)
    for j in tl.static_range(K):
        # one maximum of both: as an integer, what is not negative keeps its order; of equal ones the lower expert
        key = (p.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (BLOCK - 1 - cols)
        best_key = tl.max(key, 1)[:, None]
        at = BLOCK - 1 - (best_key & 0xFFFFFFFF)
        best = (best_key >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        chosen = tl.where(places == j, best, chosen)
        index = tl.where(places == j, at, index)
        p = tl.where(cols == at, -1.0, p)
    if NORMALISE:
        chosen = chosen / tl.sum(chosen, 1)[:, None]
    return chosen, index


@triton.jit
def _route(
    logits, weights, ids, stride,
    EXPERTS: tl.constexpr, K: tl.constexpr, NORMALISE: tl.constexpr, BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) + tl.arange(0, 1)).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + row * stride + cols, cols < EXPERTS, other=float("-inf")).to(tl.float32)
    chosen, index = chosen_experts(x, EXPERTS, K, NORMALISE, BLOCK, K_BLOCK)
    places = tl.arange(0, K_BLOCK)[None, :]
    tl.store(weights + row * K + places, chosen, places < K)
    tl.store(ids + row * K + places, index, places < K)


def route(logits: torch.Tensor, normalise: bool, weights: torch.Tensor, ids: torch.Tensor) -> None:
    """Softmax over [T, E], the top k (the lower id first where equal) into weights float32, ids int64, [T, k]."""
    rows, experts = logits.shape
    top_k = ids.shape[1]
    _route[(rows,)](
        logits, weights, ids, logits.stride(0),
        EXPERTS=experts, K=top_k, NORMALISE=normalise,
        BLOCK=triton.next_power_of_2(experts), K_BLOCK=triton.next_power_of_2(top_k), num_warps=1,
    )  # fmt: skip
