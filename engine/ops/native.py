"""`engine.ops.base.Ops` on the native kernels: computed in float32, rounded once when stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.architectures.parts.mlp import Router
from engine.errors import EngineError
from engine.ops.base import PlainOps
from engine.ops.rope import Rope

if TYPE_CHECKING:
    from native import _native

_BF16 = torch.bfloat16


class NativeOps(PlainOps):
    """bf16 or float32 tensors on the CPU, rows any stride apart; norm weights in the activations' dtype or float32.

    A call of a few rows runs on the caller's thread; larger ones are shared out over `pool`. A row's result does not
    depend on its neighbours. NaN spreads over its row (its head, in `qk_norm_rope`) and no further.
    """

    def __init__(self, eps: float, pool: _native.WorkerPool, isa: str = "") -> None:
        from native import _native

        self.kernel = _native.Ops(pool, isa)
        self.eps = eps

    def embed(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """table [V, H] contiguous, ids int64 [T] contiguous."""
        out = torch.empty((ids.shape[0], table.shape[1]), dtype=table.dtype)
        _contiguous("table", table)
        _typed("ids", ids, torch.int64)
        try:
            self.kernel.embed(
                ids=ids.data_ptr(),
                rows=ids.shape[0],
                table=table.data_ptr(),
                vocab=table.shape[0],
                dim=table.shape[1],
                out=out.data_ptr(),
                out_stride=out.stride(0),
                element_bytes=table.element_size(),
            )
        except ValueError as error:
            raise EngineError(f"embed: {error}") from error
        return out

    def add_rms_norm(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The sum is rounded before it is normalised, as it is when it is kept."""
        rows, dim = residual.shape
        bf16 = _rows("residual", residual, residual.dtype, dim)
        _weight("weight", weight, residual.dtype, dim)
        out = torch.empty_like(residual, memory_format=torch.contiguous_format) if out is None else out
        _given("out", out, residual.dtype, residual.shape)
        x, added = residual, None
        if delta is not None:
            _rows("delta", delta, residual.dtype, dim)
            if delta.shape != residual.shape:
                raise EngineError(f"delta: {tuple(delta.shape)}; wanted {tuple(residual.shape)}")
            x, added = delta, residual
        self.kernel.norm(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            residual=0 if added is None else added.data_ptr(),
            residual_stride=0 if added is None else added.stride(0),
            weight=weight.data_ptr(),
            weight_bf16=weight.dtype is _BF16,
            out=out.data_ptr(),
            out_stride=dim,
            rows=rows,
            dim=dim,
            eps=self.eps,
            is_bf16=bf16,
        )
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, dim = x.shape
        bf16 = _rows("x", x, x.dtype, dim)
        _weight("weight", weight, x.dtype, dim)
        out = torch.empty((rows, dim), dtype=x.dtype)
        self.kernel.norm(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            residual=0,
            residual_stride=0,
            weight=weight.data_ptr(),
            weight_bf16=weight.dtype is _BF16,
            out=out.data_ptr(),
            out_stride=dim,
            rows=rows,
            dim=dim,
            eps=eps,
            is_bf16=bf16,
        )
        return out

    def rotate(self, x: torch.Tensor, rope: Rope, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
        tokens, heads, dim = x.shape
        bf16 = x.dtype is _BF16
        if dim != rope.dim or x.stride(2) != 1 or not (bf16 or x.dtype is torch.float32):
            raise EngineError(f"x: {x.dtype} {tuple(x.shape)}; wanted bf16 or float32 [T, heads, {rope.dim}]")
        _typed("positions", positions, torch.int64)
        if positions.shape[0] != tokens:
            raise EngineError(f"positions: {positions.shape[0]}; wanted one for each of {tokens} tokens")
        out = torch.empty((tokens, heads, dim), dtype=x.dtype)
        try:
            self.kernel.rotate(
                x=x.data_ptr(),
                x_stride=x.stride(0),
                x_head_stride=x.stride(1),
                out=out.data_ptr(),
                out_stride=heads * dim,
                out_head_stride=dim,
                cos=rope.cos.data_ptr(),
                sin=rope.sin.data_ptr(),
                positions=positions.data_ptr(),
                table_rows=rope.cos.shape[0],
                tokens=tokens,
                heads=heads,
                dim=dim,
                interleaved=interleaved,
                is_bf16=bf16,
            )
        except ValueError as error:
            raise EngineError(f"rotate: {error}") from error
        return out

    def qk_norm_rope(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        rope: Rope,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In place; q and k are also returned. They may be slices of one tensor. Of a head as many values are rotated
        as the tables are made for."""
        tokens, heads, dim = q.shape
        bf16 = _heads("q", q, q.dtype, tokens, dim)
        _heads("k", k, q.dtype, tokens, dim)
        if q_weight is not None and k_weight is not None:
            _weight("q_weight", q_weight, q.dtype, dim)
            _weight("k_weight", k_weight, q_weight.dtype, dim)
        _typed("positions", positions, torch.int64)
        cos, sin = rope.cos, rope.sin
        if positions.shape[0] != tokens:
            raise EngineError(f"positions: {positions.shape[0]}; wanted one for each of {tokens} tokens")
        if rope.dim > dim:
            raise EngineError(f"head_dim: {dim}; the rotation's tables are made for {rope.dim} or more")
        try:
            self.kernel.qk_norm_rope(
                q=q.data_ptr(),
                q_stride=q.stride(0),
                k=k.data_ptr(),
                k_stride=k.stride(0),
                q_weight=0 if q_weight is None else q_weight.data_ptr(),
                k_weight=0 if k_weight is None else k_weight.data_ptr(),
                weight_bf16=q_weight is not None and q_weight.dtype is _BF16,
                cos=cos.data_ptr(),
                sin=sin.data_ptr(),
                positions=positions.data_ptr(),
                table_rows=cos.shape[0],
                tokens=tokens,
                heads=heads,
                kv_heads=k.shape[1],
                head_dim=dim,
                rotary_dim=rope.dim,
                eps=self.eps,
                is_bf16=bf16,
            )
        except ValueError as error:
            raise EngineError(f"qk_norm_rope: {error}") from error
        return q, k

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """[T, N] each, rows any stride apart -> [T, N]."""
        rows, dim = gate.shape
        bf16 = _rows("gate", gate, gate.dtype, dim)
        _rows("up", up, gate.dtype, dim)
        if up.shape != gate.shape:
            raise EngineError(f"up: {tuple(up.shape)}; wanted {tuple(gate.shape)}")
        out = torch.empty((rows, dim), dtype=gate.dtype)
        self.kernel.silu_mul(
            gate=gate.data_ptr(),
            gate_stride=gate.stride(0),
            up=up.data_ptr(),
            up_stride=up.stride(0),
            out=out.data_ptr(),
            out_stride=dim,
            rows=rows,
            dim=dim,
            is_bf16=bf16,
        )
        return out

    def add_gated(self, base: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        rows, dim = base.shape
        bf16 = _rows("base", base, base.dtype, dim)
        _rows("x", x, base.dtype, dim)
        _given("gate", gate, torch.float32, (rows, 1))
        if x.shape != base.shape:
            raise EngineError(f"x: {tuple(x.shape)}; wanted {tuple(base.shape)}")
        out = torch.empty((rows, dim), dtype=base.dtype)
        self.kernel.add_gated(
            base=base.data_ptr(),
            base_stride=base.stride(0),
            x=x.data_ptr(),
            x_stride=x.stride(0),
            gate=gate.data_ptr(),
            out=out.data_ptr(),
            out_stride=dim,
            rows=rows,
            dim=dim,
            is_bf16=bf16,
        )
        return out

    def gate_heads(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """In place; heads of x are contiguous, those of gate any stride apart."""
        tokens, heads, dim = x.shape
        bf16 = _heads("x", x, x.dtype, tokens, dim)
        if gate.shape != x.shape or gate.dtype is not x.dtype or gate.stride(2) != 1:
            raise EngineError(f"gate: {gate.dtype} {tuple(gate.shape)}; wanted {x.dtype} {tuple(x.shape)}")
        self.kernel.gate_heads(
            gate=gate.data_ptr(),
            gate_stride=gate.stride(0),
            gate_head_stride=gate.stride(1),
            x=x.data_ptr(),
            x_stride=x.stride(0),
            tokens=tokens,
            heads=heads,
            dim=dim,
            is_bf16=bf16,
        )
        return x

    def route(
        self,
        logits: torch.Tensor,
        top_k: int,
        router: Router,
        bias: torch.Tensor | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In float32; experts and groups in torch.topk's order, also among equals."""
        rows, experts = logits.shape
        bf16 = _rows("logits", logits, logits.dtype, experts)
        if out is None:
            out = torch.empty((rows, top_k), dtype=torch.float32), torch.empty((rows, top_k), dtype=torch.int64)
        weights, ids = out
        _given("weights", weights, torch.float32, (rows, top_k))
        _given("ids", ids, torch.int64, (rows, top_k))
        try:
            self.kernel.router_topk(
                logits=logits.data_ptr(),
                stride=logits.stride(0),
                rows=rows,
                experts=experts,
                router=native_router(router, experts, top_k, bias),
                ids=ids.data_ptr(),
                weights=weights.data_ptr(),
                is_bf16=bf16,
            )
        except ValueError as error:
            raise EngineError(f"route: {error}") from error
        return weights, ids


def native_router(router: Router, experts: int, top_k: int, bias: torch.Tensor | None) -> _native.Router:
    """What the kernels take of a router. `bias`: float32 [experts], which must outlive it, where the router has one."""
    from native import _native

    if (bias is not None) != router.bias:
        raise EngineError(
            f"bias: {'one' if bias is not None else 'none'}; the router has {'one' if router.bias else 'none'}"
        )
    if bias is not None:
        _given("bias", bias, torch.float32, (experts,))
    return _native.Router(
        top_k,
        score=router.score,
        bias=0 if bias is None else bias.data_ptr(),
        groups=router.groups,
        top_groups=router.top_groups,
        group_score=router.group_score,
        normalise=router.normalise,
        scale=router.scale,
    )


def _rows(name: str, t: torch.Tensor, dtype: torch.dtype, dim: int) -> bool:
    """Whether it is bf16; EngineError unless [T, dim] of `dtype`, bf16 or float32, with contiguous rows."""
    bf16 = t.dtype is _BF16
    if t.dim() != 2 or t.shape[1] != dim or t.dtype is not dtype or not (bf16 or dtype is torch.float32):
        raise EngineError(f"{name}: {t.dtype} {tuple(t.shape)}; wanted bf16 or float32 as its partners, [T, {dim}]")
    if dim > 1 and t.stride(1) != 1:
        raise EngineError(f"{name}: strides {t.stride()}; rows must be contiguous")
    return bf16


def _heads(name: str, t: torch.Tensor, dtype: torch.dtype, tokens: int, dim: int) -> bool:
    bf16 = t.dtype is _BF16
    if t.dim() != 3 or t.shape[0] != tokens or t.shape[2] != dim or t.dtype is not dtype:
        raise EngineError(f"{name}: {t.dtype} {tuple(t.shape)}; wanted {dtype} [{tokens}, heads, {dim}]")
    if t.stride()[1:] != (dim, 1) or not (bf16 or dtype is torch.float32):
        raise EngineError(f"{name}: {t.dtype} strides {t.stride()}; wanted bf16 or float32, heads contiguous")
    return bf16


def _weight(name: str, t: torch.Tensor, dtype: torch.dtype, dim: int) -> None:
    if t.shape != (dim,) or not t.is_contiguous() or t.dtype not in (dtype, torch.float32):
        raise EngineError(f"{name}: {t.dtype} {tuple(t.shape)}; wanted {dtype} or float32 [{dim}]")


def _contiguous(name: str, t: torch.Tensor) -> None:
    if t.dim() != 2 or not t.is_contiguous():
        raise EngineError(f"{name}: {tuple(t.shape)} strides {t.stride()}; wanted two contiguous dimensions")


def _given(name: str, t: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if t.shape != shape or t.dtype is not dtype or not t.is_contiguous():
        raise EngineError(f"{name}: {t.dtype} {tuple(t.shape)}; wanted contiguous {dtype} {tuple(shape)}")


def _typed(name: str, t: torch.Tensor, dtype: torch.dtype) -> None:
    if t.dim() != 1 or t.dtype is not dtype or not t.is_contiguous():
        raise EngineError(f"{name}: {t.dtype} {tuple(t.shape)}; wanted contiguous {dtype} [T]")
