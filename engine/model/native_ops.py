"""`engine.model.ops.Ops` on the native kernels: computed in float32, rounded once when stored."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from engine.errors import EngineError
from engine.model.rope import Rope

_BF16 = torch.bfloat16


class NativeOps:
    """bf16 or float32 tensors on the CPU, rows any stride apart; norm weights in the activations' dtype or float32.

    A call of a few rows runs on the caller's thread; larger ones are shared out over `pool`. A row's result does not
    depend on its neighbours. NaN spreads over its row (its head, in `qk_norm_rope`) and no further.
    """

    def __init__(self, eps: float, rope: Rope, pool: Any, isa: str = "") -> None:
        self.kernel: Any = importlib.import_module("native._native").Ops(pool, isa)
        self.eps = eps
        self.rope = rope

    def embed(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """table [V, H] contiguous, ids int64 [T] contiguous."""
        out = torch.empty((ids.shape[0], table.shape[1]), dtype=table.dtype)
        _contiguous("table", table)
        _typed("ids", ids, torch.int64)
        try:
            self.kernel.embed(
                ids.data_ptr(),
                ids.shape[0],
                table.data_ptr(),
                table.shape[0],
                table.shape[1],
                out.data_ptr(),
                out.stride(0),
                table.element_size(),
            )
        except ValueError as error:
            raise EngineError(f"embed: {error}") from error
        return out

    def add_rms_norm(self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """The sum is rounded before it is normalised, as it is when it is kept."""
        rows, dim = residual.shape
        bf16 = _rows("residual", residual, residual.dtype, dim)
        _weight("weight", weight, residual.dtype, dim)
        out = torch.empty_like(residual, memory_format=torch.contiguous_format)
        x, added = residual, None
        if delta is not None:
            _rows("delta", delta, residual.dtype, dim)
            if delta.shape != residual.shape:
                raise EngineError(f"delta: {tuple(delta.shape)}; wanted {tuple(residual.shape)}")
            x, added = delta, residual
        self.kernel.norm(
            x.data_ptr(),
            x.stride(0),
            0 if added is None else added.data_ptr(),
            0 if added is None else added.stride(0),
            weight.data_ptr(),
            weight.dtype is _BF16,
            out.data_ptr(),
            dim,
            rows,
            dim,
            self.eps,
            bf16,
        )
        return out

    def qk_norm_rope(
        self, q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In place; q and k are also returned. They may be slices of one tensor."""
        tokens, heads, dim = q.shape
        bf16 = _heads("q", q, q.dtype, tokens, dim)
        _heads("k", k, q.dtype, tokens, dim)
        _weight("q_weight", q_weight, q.dtype, dim)
        _weight("k_weight", k_weight, q_weight.dtype, dim)
        _typed("positions", positions, torch.int64)
        cos, sin = self.rope.cos, self.rope.sin
        if positions.shape[0] != tokens:
            raise EngineError(f"positions: {positions.shape[0]}; wanted one for each of {tokens} tokens")
        if cos.shape[1] * 2 != dim:
            raise EngineError(f"head_dim: {dim}; the rotation's tables are made for {cos.shape[1] * 2}")
        try:
            self.kernel.qk_norm_rope(
                q.data_ptr(),
                q.stride(0),
                k.data_ptr(),
                k.stride(0),
                q_weight.data_ptr(),
                k_weight.data_ptr(),
                q_weight.dtype is _BF16,
                cos.data_ptr(),
                sin.data_ptr(),
                positions.data_ptr(),
                cos.shape[0],
                tokens,
                heads,
                k.shape[1],
                dim,
                self.eps,
                bf16,
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
            gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0), out.data_ptr(), dim, rows, dim, bf16
        )
        return out

    def route(self, logits: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Softmax in float32, then the top k in torch.topk's order, also among equal probabilities."""
        rows, experts = logits.shape
        bf16 = _rows("logits", logits, logits.dtype, experts)
        ids = torch.empty((rows, top_k), dtype=torch.int64)
        weights = torch.empty((rows, top_k), dtype=torch.float32)
        try:
            self.kernel.router_topk(
                logits.data_ptr(),
                logits.stride(0),
                rows,
                experts,
                top_k,
                normalise,
                ids.data_ptr(),
                weights.data_ptr(),
                bf16,
            )
        except ValueError as error:
            raise EngineError(f"route: {error}") from error
        return weights, ids


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


def _typed(name: str, t: torch.Tensor, dtype: torch.dtype) -> None:
    if t.dim() != 1 or t.dtype is not dtype or not t.is_contiguous():
        raise EngineError(f"{name}: {t.dtype} {tuple(t.shape)}; wanted contiguous {dtype} [T]")
