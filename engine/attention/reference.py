"""Paged attention in plain torch, row by row: the oracle, and the fallback that a rule may ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from engine.architectures.parts.gqa import GroupedQuery
from engine.attention.base import BLOCK_SIZE, AttentionBackend, BatchLayout, unit_bytes


@dataclass(frozen=True)
class RowPlan:
    """One row of a step."""

    tokens: slice  # of the batch
    gather: torch.Tensor  # int64 [context]: where its positions lie
    mask: torch.Tensor | None  # bool [tokens, context]: what each token sees; None: all


def plan_rows(batch: BatchLayout, window: int | None = None) -> list[RowPlan]:
    """`window`: how many positions a token sees at most, itself included."""
    device, rows = batch.positions.device, []
    for r, context in enumerate(batch.context_lens):
        new = batch.row_starts[r + 1] - batch.row_starts[r]
        used = (context + BLOCK_SIZE - 1) // BLOCK_SIZE
        blocks = torch.tensor(batch.block_tables[r][:used], dtype=torch.int64, device=device)
        offsets = torch.arange(BLOCK_SIZE, device=device)
        gather = (blocks[:, None] * BLOCK_SIZE + offsets).flatten()[:context]
        # query i stands at position context - new + i and sees itself and all before, or the last of them
        mask: torch.Tensor | None = torch.ones(new, context, dtype=torch.bool, device=device).tril(context - new)
        if window is not None and mask is not None:
            mask = mask.triu(context - new - window + 1)
        if new == 1 and (window is None or context <= window):
            mask = None
        rows.append(RowPlan(slice(batch.row_starts[r], batch.row_starts[r + 1]), gather, mask))
    return rows


class ReferenceAttention(AttentionBackend):
    """KV of each of `layers`, all of one `spec`: two tensors [num_blocks, BLOCK_SIZE, G, D]. Works on any
    device, bf16 or float32."""

    rows_share = True

    def __init__(
        self, spec: GroupedQuery, layers: Sequence[int], num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_blocks, BLOCK_SIZE, spec.kv_heads, spec.head_dim)
        self.cache = {
            layer: (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for layer in layers
        }
        self._spec = spec
        self._on_gpu = device.type != "cpu"
        self._sinks: dict[int, torch.Tensor] = {}
        self._token_bytes = len(layers) * spec.cache.position_bytes(dtype.itemsize)
        self._planned: tuple[BatchLayout, list[RowPlan]] | None = None

    def beside(self) -> ReferenceAttention:
        return copy(self)

    @property
    def kv_bytes_per_token(self) -> int:
        return self._token_bytes

    def set_sinks(self, layer: int, sinks: torch.Tensor) -> None:
        self._sinks[layer] = sinks

    def host_planes(self) -> list[NDArray[np.uint8]]:
        return super().host_planes() if self._on_gpu else [plane.numpy()[None] for plane in self._planes()]

    def device_planes(self) -> list[torch.Tensor]:
        return self._planes() if self._on_gpu else super().device_planes()

    def _planes(self) -> list[torch.Tensor]:
        return [unit_bytes(tensor) for pair in self.cache.values() for tensor in pair]

    def plan(self, batch: BatchLayout) -> None:
        self._planned = batch, plan_rows(batch, self._spec.window)

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._planned is None:
            raise RuntimeError("plan() comes before forward()")
        batch, rows = self._planned
        keys, values = (t.flatten(0, 1) for t in self.cache[layer])
        keys[batch.slot_mapping] = k
        values[batch.slot_mapping] = v
        out = torch.empty_like(q)
        for row in rows:
            asked, held, given = (t.transpose(0, 1) for t in (q[row.tokens], keys[row.gather], values[row.gather]))
            if layer in self._sinks:
                attended = _with_sinks(asked, held, given, row.mask, self._sinks[layer])
            else:
                attended = F.scaled_dot_product_attention(asked, held, given, attn_mask=row.mask, enable_gqa=True)
            out[row.tokens] = attended.transpose(0, 1)
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
