"""The attention of a layer: from normalised rows to what is added to the residual stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.architectures.parts.gqa import GroupedQuery
from engine.attention.base import AttentionBackend, CacheBackend
from engine.linear.base import Linear, LoraBatch
from engine.model.step import StepInput
from engine.ops.base import Ops
from engine.ops.rope import Rope
from engine.ranks.group import ALONE, Group

Joined = Callable[[torch.Tensor, LoraBatch | None], list[torch.Tensor]]


class Attention(ABC):
    """T tokens; `backend` owns the cache of this layer."""

    backend: CacheBackend

    @abstractmethod
    def output(self, ops: Ops, x: torch.Tensor, step: StepInput) -> torch.Tensor:
        """Normalised rows [T, H] -> what the attention adds to the residual stream [T, H]."""


@dataclass
class GroupedQueryAttention(Attention):
    """`q_norm` and `k_norm` are None where the family has none, else [head_dim], or [heads x head_dim] of a norm over
    the whole projection."""

    spec: GroupedQuery
    layer: int
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    norm_eps: float
    rope: Rope
    backend: AttentionBackend
    sinks: torch.Tensor | None = None  # float32 [heads], which the backend has
    joined: Joined | None = None  # q, k and v at once
    group: Group = ALONE  # each rank has some of the heads

    def output(self, ops: Ops, x: torch.Tensor, step: StepInput) -> torch.Tensor:
        spec, positions = self.spec, step.batch.positions
        flat_q, flat_k, flat_v = self._qkv(x, step.lora)
        q_norm, k_norm = self.q_norm, self.k_norm
        if spec.qk_norm == "whole" and q_norm is not None and k_norm is not None:
            flat_q, flat_k = self._norm_all(ops, flat_q, flat_k, q_norm, k_norm)
            q_norm = k_norm = None
        q, gate = flat_q.view(-1, spec.heads, spec.head_dim * (2 if spec.gated else 1)), None
        if spec.gated:
            q, gate = q[..., : spec.head_dim].contiguous(), q[..., spec.head_dim :]
        k, v = (part.view(-1, spec.kv_heads, spec.head_dim) for part in (flat_k, flat_v))
        places = self.backend.places(self.layer)
        if places is not None:
            q = ops.qk_norm_rope_keep(q, k, v, q_norm, k_norm, self.rope, positions, places)
            out = self.backend.attend(self.layer, q)
        else:
            q, k = ops.qk_norm_rope(q, k, q_norm, k_norm, self.rope, positions)
            out = self.backend.forward(self.layer, q, k, v)
        return self.o((out if gate is None else ops.gate_heads(out, gate)).flatten(1), step.lora)

    def _norm_all(
        self, ops: Ops, q: torch.Tensor, k: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Over the heads of all ranks, whose squares come in one sum."""
        if self.group.size == 1:
            return ops.add_rms_norm(q, None, q_norm), ops.add_rms_norm(k, None, k_norm)
        wide = [part.float() for part in (q, k)]
        squares = self.group.sum(torch.stack([part.pow(2).mean(-1) for part in wide], -1)) / self.group.size
        scales = torch.rsqrt(squares + self.norm_eps)
        first, second = (
            (part * scales[:, i : i + 1]).to(q.dtype) * weight
            for i, (part, weight) in enumerate(zip(wide, (q_norm, k_norm), strict=True))
        )
        return first, second

    def _qkv(self, x: torch.Tensor, lora: LoraBatch | None) -> list[torch.Tensor]:
        return [self.q(x, lora), self.k(x, lora), self.v(x, lora)] if self.joined is None else self.joined(x, lora)
