"""Paged attention in plain torch, row by row: the oracle, and the fallback that a rule may ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from engine.architectures.parts.gqa import GroupedQuery
from engine.attention.base import BLOCK_SIZE, AttentionBackend, BatchLayout


@dataclass(frozen=True)
class _Plan:
    batch: BatchLayout
    gathers: list[torch.Tensor]  # of each row: where its positions lie
    masks: list[torch.Tensor | None]


class ReferenceAttention(AttentionBackend):
    """KV of each of `layers`, all of one `spec`: two tensors [num_blocks, BLOCK_SIZE, G, D]. Works on any
    device, bf16 or float32."""

    def __init__(
        self, spec: GroupedQuery, layers: Sequence[int], num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_blocks, BLOCK_SIZE, spec.kv_heads, spec.head_dim)
        self.cache = {
            layer: (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for layer in layers
        }
        self._spec = spec
        self._sinks: dict[int, torch.Tensor] = {}
        self._token_bytes = len(layers) * spec.cache.position_bytes(dtype.itemsize)
        self._plan: _Plan | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        return self._token_bytes

    def set_sinks(self, layer: int, sinks: torch.Tensor) -> None:
        self._sinks[layer] = sinks

    def kv_planes(self) -> list[NDArray[np.uint8]]:
        tensors = [tensor for pair in self.cache.values() for tensor in pair]
        if tensors[0].device.type != "cpu":
            return super().kv_planes()
        return [tensor.flatten(1).view(torch.uint8).numpy()[None] for tensor in tensors]

    def plan(self, batch: BatchLayout) -> None:
        device = batch.positions.device
        plan = self._plan = _Plan(batch, [], [])
        for r in range(batch.num_rows):
            context, new = batch.context_lens[r], batch.row_starts[r + 1] - batch.row_starts[r]
            used = (context + BLOCK_SIZE - 1) // BLOCK_SIZE
            blocks = torch.tensor(batch.block_tables[r][:used], dtype=torch.int64, device=device)
            offsets = torch.arange(BLOCK_SIZE, device=device)
            plan.gathers.append((blocks[:, None] * BLOCK_SIZE + offsets).flatten()[:context])
            # query i stands at position context - new + i and sees itself and all before, or the last of them
            mask = torch.ones(new, context, dtype=torch.bool, device=device).tril(context - new)
            if (window := self._spec.window) is not None:
                mask = mask.triu(context - new - window + 1)
            plan.masks.append(None if new == 1 and (window is None or context <= window) else mask)

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        plan = self._plan
        if plan is None:
            raise RuntimeError("plan() comes before forward()")
        batch = plan.batch
        keys, values = (t.flatten(0, 1) for t in self.cache[layer])
        keys[batch.slot_mapping] = k
        values[batch.slot_mapping] = v
        out = torch.empty_like(q)
        for r in range(batch.num_rows):
            rows = slice(batch.row_starts[r], batch.row_starts[r + 1])
            asked, held, given = (t.transpose(0, 1) for t in (q[rows], keys[plan.gathers[r]], values[plan.gathers[r]]))
            if layer in self._sinks:
                attended = _with_sinks(asked, held, given, plan.masks[r], self._sinks[layer])
            else:
                attended = F.scaled_dot_product_attention(asked, held, given, attn_mask=plan.masks[r], enable_gqa=True)
            out[rows] = attended.transpose(0, 1)
        return out


def _with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor
) -> torch.Tensor:
    """q [H, T, D], k, v [G, C, D], mask [T, C], sinks [H] -> [H, T, D]: a sink takes part in the softmax alone. In
    float32."""
    grouped = q.float().reshape(k.shape[0], -1, *q.shape[1:])
    scores = grouped @ k.float()[:, None].transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    sink = sinks.view(*grouped.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    shares = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
    return (shares @ v.float()[:, None]).flatten(0, 1).to(q.dtype)
