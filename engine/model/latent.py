"""Latent attention of a layer, absorbed, or expanded where a sequence has many tokens in a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from engine.architectures.parts.mla import Latent
from engine.attention.base import AttentionBackend
from engine.attention.latent import LatentBackend
from engine.linear.base import LatentUp, Linear, LoraBatch
from engine.linear.latent import TorchLatentUp
from engine.model.attention import Attention
from engine.model.step import StepInput
from engine.ops.base import Ops
from engine.ops.rope import Rope


@dataclass
class LatentAttention(Attention):
    """`q` is q_b where there is a `q_a`, whose results `q_a_norm` [q_rank] normalises; `kv_a_norm` [kv_rank]."""

    spec: Latent
    layer: int
    q_a: Linear | None
    q_a_norm: torch.Tensor | None
    q: Linear
    kv_a: Linear
    kv_a_norm: torch.Tensor
    kv_b: LatentUp
    o: Linear
    rope: Rope
    backend: AttentionBackend

    def output(self, ops: Ops, x: torch.Tensor, step: StepInput) -> torch.Tensor:
        spec, lora, backend = self.spec, step.lora, self.backend
        q_nope, q_rope, kept = self._projected(ops, x, step)
        if isinstance(backend, LatentBackend) and isinstance(self.kv_b, TorchLatentUp) and backend.longs:
            out = self._expanded(backend, self.kv_b, q_nope, q_rope, kept, lora)
        else:
            q = torch.cat((self.kv_b.absorb(q_nope, lora), q_rope), dim=-1)
            mixed = backend.forward(self.layer, q, kept, kept[..., : spec.kv_rank])
            out = self.kv_b.values(mixed, lora)
        return self.o(out.flatten(1), lora)

    def _projected(self, ops: Ops, x: torch.Tensor, step: StepInput) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, H, nope] and, rotated, [T, H, rope]; what the cache is to keep [T, 1, width]."""
        spec, lora, positions = self.spec, step.lora, step.batch.positions
        latents = self.kv_a(x, lora)
        if self.q_a is not None and self.q_a_norm is not None:
            x = ops.rms_norm(self.q_a(x, lora), self.q_a_norm, spec.norm_eps)
        q = self.q(x, lora).view(-1, spec.heads, spec.nope_dim + spec.rope_dim)
        q_nope, q_rope = q[..., : spec.nope_dim], q[..., spec.nope_dim :]
        c = ops.rms_norm(latents[:, : spec.kv_rank], self.kv_a_norm, spec.norm_eps)
        k_rope = latents[:, None, spec.kv_rank :]
        q_rope, k_rope = (ops.rotate(part, self.rope, positions, spec.interleaved) for part in (q_rope, k_rope))
        return q_nope, q_rope, torch.cat((c[:, None], k_rope), dim=-1)

    def _expanded(
        self,
        backend: LatentBackend,
        up: TorchLatentUp,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        kept: torch.Tensor,
        lora: LoraBatch | None,
    ) -> torch.Tensor:
        """[T, H, value]: long sequences expanded, the others absorbed."""
        out = q_nope.new_empty((*q_nope.shape[:2], self.spec.value_dim))
        backend.keep(self.layer, kept)
        for number, tokens in enumerate(backend.longs):
            slot = 0 if lora is None else lora.host_slots[tokens.start]  # all of a sequence have one
            q = torch.cat((q_nope[tokens], q_rope[tokens]), dim=-1)
            out[tokens] = backend.expanded(self.layer, number, q, partial(up.expand, slot=slot))
        for number, tokens in enumerate(backend.shorts):
            own = None if lora is None else lora.rows(torch.arange(tokens.start, tokens.stop, device=q_nope.device))
            q = torch.cat((up.absorb(q_nope[tokens], own), q_rope[tokens]), dim=-1)
            out[tokens] = up.values(backend.absorbed(self.layer, number, q), own)
        return out
