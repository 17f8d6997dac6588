"""The small operations between the products: norms, rotation, routing. One implementation per machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F

from engine.architectures.parts.mlp import Router
from engine.attention.base import KvPlaces
from engine.ops.greedy import NOT_FINITE, greedy_tokens, largest
from engine.ops.rope import Rope

P = TypeVar("P", bound="PlainOps")


@dataclass(frozen=True)
class RowAdapters:
    """What adapters add to a product x W^T: scales[s] B[s] (A[s] x) to a row of slot s, nothing where ranks[s] is 0.

    slots int32 [T]; a [S, R, in], b [S, out, R]; scales float32 [S]; ranks int32 [S], at most R and multiples of 16.
    """

    slots: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor
    ranks: torch.Tensor


class Ops(Protocol):
    def beside(self) -> Ops:
        """The same operations, for steps that are computed at the same time on another thread and stream."""
        ...

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

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """rms_norm(x) * weight with an epsilon of its own: x [T, N] -> [T, N], a fresh tensor."""

    def rotate(self, x: torch.Tensor, rope: Rope, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
        """`Rope.apply` to x [T, heads, rope.dim], a fresh tensor."""

    def qk_norm_rope(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        rope: Rope,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Per-head RMS norm (none if both weights are None), then rotation: q [T, heads, D], k [T, kv_heads, D]."""

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
        """`qk_norm_rope` of q and k, and k and v [T, kv_heads, D] into their places. Returns q."""

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor: ...

    def add_gated(self, base: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """base + sigmoid(gate) x: base, x [T, H], gate float32 [T, 1] -> [T, H], a fresh tensor."""

    def gate_heads(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x sigmoid(gate), both [T, heads, D]; x may be overwritten."""

    def route(
        self,
        logits: torch.Tensor,
        top_k: int,
        router: Router,
        bias: torch.Tensor | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits float32 [T, E] -> weights float32 [T, k], expert ids int64 [T, k]; `bias` float32 [E]: of the choice,
        where the router has one; `out`: where they go."""

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
        """`add_rms_norm`, the product with gate float32 [E, H], and `route` without a bias, at once; `out`: where the
        norm [T, H], the weights and the ids go; `adapters`: of the gate. False, with nothing done, where one call is
        not faster than three."""

    def next_ids(self, ids: torch.Tensor, sources: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """int64 [T]: sampled[source] where the source is not negative, but at least 0; else the id. All int64."""

    def greedy(self, logits: torch.Tensor, tokens: torch.Tensor, sampled: torch.Tensor) -> None:
        """logits [R, V] -> `greedy_tokens` into the first of tokens int64 [M]; the same, but at least 0, into those of
        sampled int64 [M]."""

    def best(self, logits: torch.Tensor, first: int, pairs: torch.Tensor) -> None:
        """logits [R, V], of the tokens from `first` on -> into the first of pairs float32 [M, 2] a row's largest logit,
        inf if one is no number, and its token."""

    def best_of(self, pairs: torch.Tensor, tokens: torch.Tensor, sampled: torch.Tensor) -> None:
        """`greedy`, where pairs float32 [R, N, 2] are `best` of N parts of the logits, in order."""


class PlainOps:
    """What takes several calls of the others where no kernel does it at once."""

    qk_norm_rope: Callable[..., tuple[torch.Tensor, torch.Tensor]]

    def beside(self: P) -> P:
        return self

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
        q, k = self.qk_norm_rope(q, k, q_weight, k_weight, rope, positions)
        for cache, values in ((places.keys, k), (places.values, v)):
            if cache.dtype.itemsize == 1:
                largest = torch.finfo(cache.dtype).max
                values = values.clamp(-largest, largest)
            cache.flatten(0, 1)[places.slots] = values.to(cache.dtype)
        return q

    def gate_heads(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(gate)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def rotate(self, x: torch.Tensor, rope: Rope, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
        return rope.apply(x, positions, interleaved=interleaved)

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
        return False

    def next_ids(self, ids: torch.Tensor, sources: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        return torch.where(sources >= 0, sampled[sources.clamp(min=0)].clamp(min=0), ids)

    def greedy(self, logits: torch.Tensor, tokens: torch.Tensor, sampled: torch.Tensor) -> None:
        found = greedy_tokens(logits.float())
        tokens[: len(found)] = found
        sampled[: len(found)] = found.clamp(min=0)

    def best(self, logits: torch.Tensor, first: int, pairs: torch.Tensor) -> None:
        logit, tokens = largest(logits.float())
        pairs[: len(tokens), 0] = torch.where(logit.isnan(), torch.inf, logit)
        pairs[: len(tokens), 1] = tokens + first

    def best_of(self, pairs: torch.Tensor, tokens: torch.Tensor, sampled: torch.Tensor) -> None:
        logit, part = pairs[..., 0].max(-1)  # of equal ones the first
        found = pairs[..., 1].gather(1, part[:, None])[:, 0].long().where(logit.isfinite(), NOT_FINITE)
        tokens[: len(found)] = found
        sampled[: len(found)] = found.clamp(min=0)


class TorchOps(PlainOps):
    """Any device, bf16 or float32; norms in float32 as in transformers."""

    def __init__(self, eps: float) -> None:
        self.eps = eps

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
        normed = rms_norm(residual, weight, self.eps)
        return normed if out is None else out.copy_(normed)

    def qk_norm_rope(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        rope: Rope,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if q_weight is not None and k_weight is not None:
            q, k = rms_norm(q, q_weight, self.eps), rms_norm(k, k_weight, self.eps)
        return rope.apply(q, positions), rope.apply(k, positions)

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up

    def add_gated(self, base: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return (base + torch.sigmoid(gate) * x).to(base.dtype)

    def route(
        self,
        logits: torch.Tensor,
        top_k: int,
        router: Router,
        bias: torch.Tensor | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = route(logits, top_k, router, bias)
        return (weights, ids) if out is None else (out[0].copy_(weights), out[1].copy_(ids))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension, in float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def route(
    logits: torch.Tensor, top_k: int, router: Router, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Ops.route` of any router, in torch."""
    logits = logits.float()
    scores = F.softmax(logits, dim=-1) if router.score == "softmax" else torch.sigmoid(logits)
    if router.plain:
        weights, ids = torch.topk(scores, top_k, dim=-1)
    else:
        choice = scores if bias is None else scores + bias
        if router.groups > 1:
            choice = _of_best_groups(choice, router)
        ids = torch.topk(choice, top_k, dim=-1).indices
        weights = scores.gather(1, ids)
    if router.normalise is not None:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + router.normalise)
    return (weights if router.scale == 1.0 else weights * router.scale), ids


def _of_best_groups(choice: torch.Tensor, router: Router) -> torch.Tensor:
    """choice [T, E], -inf for experts of groups that are not among the best."""
    grouped = choice.view(len(choice), router.groups, -1)
    counted = 1 if router.group_score == "max" else min(2, grouped.shape[-1])
    best = grouped.topk(counted, dim=-1).values.sum(-1).topk(router.top_groups, dim=-1).indices
    kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, best, True)
    return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
