"""Latent attention over the paged cache in plain torch: the oracle, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from engine.architectures.parts.delta import DeltaNet
from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.mla import Latent
from engine.attention.base import BLOCK_SIZE, AttentionBackend, BatchLayout, CacheBackend, unit_bytes
from engine.attention.delta import ReferenceDeltaNet, StateSlots
from engine.attention.reference import ReferenceAttention, RowPlan, plan_rows


@dataclass(frozen=True)
class Context:
    """A sequence of a step: its tokens in the batch, what the cache keeps of its positions [context, width], and what
    each token sees of them (None: all)."""

    tokens: slice
    kept: torch.Tensor
    mask: torch.Tensor | None


class ReferenceLatentAttention(AttentionBackend):
    """What is kept of each of `layers`, all of one `spec`: a tensor [num_blocks, BLOCK_SIZE, width], bf16 or
    float32."""

    def __init__(
        self, spec: Latent, layers: Sequence[int], num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._spec = spec
        self._on_gpu = device.type != "cpu"
        shape = (num_blocks, BLOCK_SIZE, spec.width)
        self.cache = {layer: torch.zeros(shape, dtype=dtype, device=device) for layer in layers}
        self._token_bytes = len(layers) * spec.cache.position_bytes(dtype.itemsize)
        self._planned: tuple[BatchLayout, list[RowPlan]] | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        return self._token_bytes

    def host_planes(self) -> list[NDArray[np.uint8]]:
        return super().host_planes() if self._on_gpu else [plane.numpy()[None] for plane in self._planes()]

    def device_planes(self) -> list[torch.Tensor]:
        return self._planes() if self._on_gpu else super().device_planes()

    def _planes(self) -> list[torch.Tensor]:
        return [unit_bytes(tensor) for tensor in self.cache.values()]

    def plan(self, batch: BatchLayout) -> None:
        self._planned = batch, plan_rows(batch)

    @property
    def longest(self) -> int:
        """Tokens of the planned step that are of one sequence, at most."""
        return max(int(row.tokens.stop - row.tokens.start) for row in self._plan()[1])

    def contexts(self, layer: int, k: torch.Tensor) -> list[Context]:
        """Write k [T, 1, width] into its blocks; what each sequence of the step then has there."""
        batch, rows = self._plan()
        kept = self.cache[layer].flatten(0, 1)
        kept[batch.slot_mapping] = k[:, 0]
        return [Context(row.tokens, kept[row.gather], row.mask) for row in rows]

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty((*q.shape[:2], self._spec.kv_rank), dtype=q.dtype, device=q.device)
        for context in self.contexts(layer, k):
            out[context.tokens] = self.absorbed(q[context.tokens], context)
        return out

    def absorbed(self, q: torch.Tensor, context: Context) -> torch.Tensor:
        """q [T, H, width] of one sequence -> [T, H, kv_rank]."""
        values = context.kept[:, : self._spec.kv_rank]
        return attended(q, context.kept[:, None], values[:, None], context.mask, self._spec.scale)

    def _plan(self) -> tuple[BatchLayout, list[RowPlan]]:
        if self._planned is None:
            raise RuntimeError("plan() comes before forward()")
        return self._planned


def torch_attention(
    spec: GroupedQuery | Latent | DeltaNet,
    layers: Sequence[int],
    num_blocks: int,
    slots: StateSlots,
    dtype: torch.dtype,
    device: torch.device,
) -> CacheBackend:
    """The reference of any kind."""
    if isinstance(spec, DeltaNet):
        return ReferenceDeltaNet(spec, layers, slots, device)
    if isinstance(spec, Latent):
        return ReferenceLatentAttention(spec, layers, num_blocks, dtype, device)
    return ReferenceAttention(spec, layers, num_blocks, dtype, device)


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """q [T, H, D], k [S, G, D], v [S, G, E], mask [T, S] -> [T, H, E]."""
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
