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
def _qk_norm_rope(
    q, k, q_out, k_out, q_weight, k_weight, cos, sin, positions,
    q_stride, k_stride, heads, kv_heads, eps, NORM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < HALF
    if head < heads:
        source = q + token * q_stride + head * 2 * HALF
        target = q_out + (token * heads + head) * 2 * HALF
        weight = q_weight
    else:
        source = k + token * k_stride + (head - heads) * 2 * HALF
        target = k_out + (token * kv_heads + head - heads) * 2 * HALF
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
    tl.store(target + cols, (a * c - b * s).to(dtype), mask)
    tl.store(target + HALF + cols, (b * c + a * s).to(dtype), mask)


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
        q, k, q_out, k_out, cos if q_weight is None else q_weight, cos if k_weight is None else k_weight, cos, sin,
        positions, q.stride(0), k.stride(0), heads, kv_heads, eps, NORM=q_weight is not None, HALF=half,
        BLOCK=triton.next_power_of_2(half), num_warps=1,
    )  # fmt: skip
    return q_out, k_out


@triton.jit
def _write_kv(
    keys, values, k, v, slots, k_stride, v_stride, dim,
    NARROW: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < dim
    slot = tl.load(slots + token)
    key = tl.load(k + token * k_stride + cols, mask, other=0.0)
    value = tl.load(v + token * v_stride + cols, mask, other=0.0)
    if NARROW:  # NaN is stored as NaN
        key = tl.clamp(key.to(tl.float32), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        value = tl.clamp(value.to(tl.float32), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
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
def _route(
    logits, weights, ids, stride, experts,
    K: tl.constexpr, NORMALISE: tl.constexpr, BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < experts
    x = tl.load(logits + row * stride + cols, mask, other=float("-inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    p = tl.where(mask, e / tl.sum(e, 0), -1.0)
    places = tl.arange(0, K_BLOCK)
    chosen = tl.zeros([K_BLOCK], tl.float32)
    index = tl.zeros([K_BLOCK], tl.int64)
    for j in tl.static_range(K):
        at = tl.minimum(tl.argmax(p, 0), experts - 1)  # of NaNs it may be any lane
        best = tl.sum(tl.where(cols == at, p, 0.0), 0)
        chosen = tl.where(places == j, best, chosen)
        index = tl.where(places == j, at.to(tl.int64), index)
        p = tl.where(cols == at, -1.0, p)
    if NORMALISE:
        chosen = chosen / tl.sum(chosen, 0)
    tl.store(weights + row * K + places, chosen, places < K)
    tl.store(ids + row * K + places, index, places < K)


def route(logits: torch.Tensor, normalise: bool, weights: torch.Tensor, ids: torch.Tensor) -> None:
    """Softmax over [T, E], the top k (the lower id first where equal) into weights float32, ids int64, [T, k]."""
    rows, experts = logits.shape
    top_k = ids.shape[1]
    _route[(rows,)](
        logits, weights, ids, logits.stride(0), experts,
        K=top_k, NORMALISE=normalise, BLOCK=triton.next_power_of_2(experts), K_BLOCK=triton.next_power_of_2(top_k),
        num_warps=1,
    )  # fmt: skip
