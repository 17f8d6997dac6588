"""The small operations between the products: norms, rotation, routing. One implementation per machine."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from engine.ops.rope import Rope


class Ops(Protocol):
    """T tokens, H hidden, E experts, k = top-k. Tensors keep the activations' dtype unless said."""

    def embed(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """table [V, H], ids int64 [T] -> [T, H], a fresh tensor."""

    def add_rms_norm(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """residual += delta in place (if any); returns rms_norm(residual) * weight. [T, H]. `out`, contiguous: where it
        goes; default: a fresh tensor."""

    def qk_norm_rope(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Per-head RMS norm (none if both weights are None), then rotation: q [T, heads, D], k [T, kv_heads, D]."""

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor: ...

    def add_gated(self, base: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """base + sigmoid(gate) x: base, x [T, H], gate float32 [T, 1] -> [T, H], a fresh tensor."""

    def route(
        self, logits: torch.Tensor, top_k: int, normalise: bool, out: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits float32 [T, E] -> weights float32 [T, k], expert ids int64 [T, k]; `out`: where they go."""


class TorchOps:
    """Any device, bf16 or float32; norms in float32 as in transformers."""

    def __init__(self, eps: float, rope: Rope) -> None:
        self.eps = eps
        self.rope = rope

    def embed(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, table)

    def add_rms_norm(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if delta is not None:
            residual += delta
        normed = self._rms_norm(residual, weight)
        return normed if out is None else out.copy_(normed)

    def qk_norm_rope(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if q_weight is not None and k_weight is not None:
            q, k = self._rms_norm(q, q_weight), self._rms_norm(k, k_weight)
        return self.rope.apply(q, positions), self.rope.apply(k, positions)

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up

    def add_gated(self, base: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return (base + torch.sigmoid(gate) * x).to(base.dtype)

    def route(
        self, logits: torch.Tensor, top_k: int, normalise: bool, out: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), top_k, dim=-1)
        if normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return (weights, ids) if out is None else (out[0].copy_(weights), out[1].copy_(ids))

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * weight
