"""Paged attention in plain torch, row by row: the oracle, and the fallback that a rule may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from engine.architectures.parts.gqa import GroupedQuery
from engine.attention.base import BLOCK_SIZE, AttentionBackend, BatchLayout


@dataclass(frozen=True)
class RowPlan:
    """One row of a step."""

    tokens: slice  # of the batch
    gather: torch.Tensor  # int64 [context]: where its positions lie
    mask: torch.Tensor | None  # bool [tokens, context]: what each token sees; None: all


def plan_rows(batch: BatchLayout) -> list[RowPlan]:
    device, rows = batch.positions.device, []
    for r, context in enumerate(batch.context_lens):
        new = batch.row_starts[r + 1] - batch.row_starts[r]
        used = (context + BLOCK_SIZE - 1) // BLOCK_SIZE
        blocks = torch.tensor(batch.block_tables[r][:used], dtype=torch.int64, device=device)
        offsets = torch.arange(BLOCK_SIZE, device=device)
        gather = (blocks[:, None] * BLOCK_SIZE + offsets).flatten()[:context]
        # query i stands at position context - new + i and sees itself and all before
        mask = torch.ones(new, context, dtype=torch.bool, device=device).tril(context - new)
        rows.append(RowPlan(slice(batch.row_starts[r], batch.row_starts[r + 1]), gather, None if new == 1 else mask))
    return rows


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
        self._token_bytes = len(layers) * spec.cache.position_bytes(dtype.itemsize)
        self._planned: tuple[BatchLayout, list[RowPlan]] | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        return self._token_bytes

    def kv_planes(self) -> list[NDArray[np.uint8]]:
        tensors = [tensor for pair in self.cache.values() for tensor in pair]
        if tensors[0].device.type != "cpu":
            return super().kv_planes()
        return [tensor.flatten(1).view(torch.uint8).numpy()[None] for tensor in tensors]

    def plan(self, batch: BatchLayout) -> None:
        self._planned = batch, plan_rows(batch)

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._planned is None:
            raise RuntimeError("plan() comes before forward()")
        batch, rows = self._planned
        keys, values = (t.flatten(0, 1) for t in self.cache[layer])
        keys[batch.slot_mapping] = k
        values[batch.slot_mapping] = v
        out = torch.empty_like(q)
        for row in rows:
            attended = F.scaled_dot_product_attention(
                q[row.tokens].transpose(0, 1),
                keys[row.gather].transpose(0, 1),
                values[row.gather].transpose(0, 1),
                attn_mask=row.mask,
                enable_gqa=True,
            )
            out[row.tokens] = attended.transpose(0, 1)
        return out
