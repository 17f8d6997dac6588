"""`engine.ops.base.Ops` on Triton kernels: few launches, so that little time passes between products."""

from __future__ import annotations

import importlib
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F

from engine.architectures.parts.mlp import Router
from engine.attention.base import KvPlaces
from engine.ops.base import RowAdapters, TorchOps, route
from engine.ops.greedy import NOT_FINITE
from engine.ops.rope import Rope

_WIDENS = hasattr(torch.ops.aten.mm, "dtype")  # products of bf16 into float32: from torch 2.8 on


class GpuOps:
    """bf16 or float32 tensors on one GPU. Computed in float32, rounded where `TorchOps` rounds."""

    def __init__(self, eps: float, device: torch.device) -> None:
        self.eps = eps
        self._torch = TorchOps(eps)
        self._kernels: Any = importlib.import_module("engine.ops.gpu_kernels")
        self._tokens: Any = importlib.import_module("engine.ops.gpu_tokens")
        fused: Any = importlib.import_module("engine.ops.gpu_router")
        self._router, self._fused_rows = fused.Router(device), fused.FUSED_ROWS
        self._greedy: dict[tuple[int, int], Any] = {}  # by rows at most and vocabulary
        self._narrow: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # by address, of the router held there

    def beside(self) -> GpuOps:
        other = copy(self)
        other._router, other._greedy = self._router.beside(), {}
        return other

    def embed(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, table)

    def add_rms_norm(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        into = torch.empty_like(residual) if out is None else out
        done: torch.Tensor = self._kernels.add_rms_norm(residual, delta, weight, self.eps, into)
        return done

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        done: torch.Tensor = self._kernels.add_rms_norm(x, None, weight, eps, x.new_empty(x.shape))
        return done

    def rotate(self, x: torch.Tensor, rope: Rope, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
        return rope.apply(x, positions, interleaved=interleaved)

    def qk_norm_rope(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        rope: Rope,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if rope.dim != q.shape[-1]:
            return self._in_torch(q, k, q_weight, k_weight, rope, positions)
        out: tuple[torch.Tensor, torch.Tensor] = self._kernels.qk_norm_rope(
            q, k, q_weight, k_weight, positions, rope.cos, rope.sin, self.eps
        )
        return out

    def qk_norm_rope_keep(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        rope: Rope,
        positions: torch.Tensor,
        places: KvPlaces,
    ) -> torch.Tensor:
        if rope.dim != q.shape[-1]:
            q, k = self._in_torch(q, k, q_weight, k_weight, rope, positions)
            self._kernels.write_kv(places.keys, places.values, k, v, places.slots)
            return q
        out: torch.Tensor = self._kernels.qk_norm_rope_keep(
            q, k, v, q_weight, k_weight, positions, rope.cos, rope.sin, self.eps,
            places.keys, places.values, places.slots,
        )  # fmt: skip
        return out

    def _in_torch(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        rope: Rope,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The kernels rotate whole heads."""
        return self._torch.qk_norm_rope(q, k, q_weight, k_weight, rope, positions)

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._kernels.silu_mul(gate, up)
        return out

    def add_gated(self, base: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._kernels.add_gated(base, x, gate)
        return out

    def gate_heads(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self._torch.gate_heads(x, gate)

    def route(
        self,
        logits: torch.Tensor,
        top_k: int,
        router: Router,
        bias: torch.Tensor | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of equal probabilities the lower expert comes first."""
        if not router.plain:
            weights, ids = route(logits, top_k, router, bias)
            return (weights, ids) if out is None else (out[0].copy_(weights), out[1].copy_(ids))
        if out is None:
            weights = torch.empty((logits.shape[0], top_k), dtype=torch.float32, device=logits.device)
            out = weights, torch.empty_like(weights, dtype=torch.int64)
        self._kernels.route(logits, router.normalise is not None, *out)
        return out

    def norm_route(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        gate: torch.Tensor,
        router: Router,
        out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        adapters: RowAdapters | None = None,
    ) -> bool:
        if not router.plain:
            return False
        if len(residual) > self._fused_rows:
            x, weights, ids = out
            narrow = self._as_bf16(gate) if _WIDENS and x.is_cuda and x.dtype == torch.bfloat16 else None
            if narrow is None:
                return False
            self.add_rms_norm(residual, delta, weight, x)
            logits = torch.mm(x, narrow.T, out_dtype=torch.float32)  # the same products, added in float32
            if adapters is not None:
                self._router.add_adapters(logits, x, adapters)
            self.route(logits, ids.shape[1], router, out=(weights, ids))
            return True
        self._router(residual, delta, weight, self.eps, gate, router.normalise is not None, out, adapters)
        return True

    def _as_bf16(self, router: torch.Tensor) -> torch.Tensor | None:
        """Float32 [E, H] in bf16, if that loses nothing, as of a router that a file has in bf16."""
        at = router.data_ptr()
        if at not in self._narrow:  # never in a capture: steps of all sizes run before
            narrow = router.to(torch.bfloat16)
            self._narrow[at] = router, narrow if torch.equal(narrow.float(), router) else None
        return self._narrow[at][1]

    def next_ids(self, ids: torch.Tensor, sources: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._tokens.next_ids(ids, sources, sampled)
        return out

    def greedy(self, logits: torch.Tensor, tokens: torch.Tensor, sampled: torch.Tensor) -> None:
        """Of equal logits the lower token is taken."""
        self._best_logits(len(tokens), logits).tokens(logits, NOT_FINITE, tokens, sampled)

    def best(self, logits: torch.Tensor, first: int, pairs: torch.Tensor) -> None:
        self._best_logits(len(pairs), logits).pairs(logits, first, pairs)

    def best_of(self, pairs: torch.Tensor, tokens: torch.Tensor, sampled: torch.Tensor) -> None:
        self._tokens.best_of(pairs, NOT_FINITE, tokens, sampled)

    def _best_logits(self, rows: int, logits: torch.Tensor) -> Any:
        size = rows, logits.shape[1]
        if size not in self._greedy:
            self._greedy[size] = self._tokens.Best(*size, logits.device)
        return self._greedy[size]
