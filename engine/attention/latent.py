"""Latent attention over the paged cache in plain torch: the oracle, on any device."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

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

Expand = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # latents [n, kv_rank] -> k_nope, v [n, H, ...]


class LatentBackend(AttentionBackend):
    """Attention over latents that is absorbed (`forward`), or in a step with sequences of many tokens their rows
    expanded and the others absorbed: `keep`, then one call for each of `longs` and `shorts`, which are the tokens of
    the planned step."""

    longs: Sequence[slice] = ()  # a sequence each; none: `forward` does
    shorts: Sequence[slice] = ()

    @abstractmethod
    def keep(self, layer: int, kept: torch.Tensor) -> None:
        """Write [T, 1, width] into the blocks of the step's tokens."""

    @abstractmethod
    def expanded(self, layer: int, number: int, q: torch.Tensor, expand: Expand) -> torch.Tensor:
        """q [T, H, nope + rope] of longs[number], over keys and values that `expand` makes of latents ->
        [T, H, value]."""

    @abstractmethod
    def absorbed(self, layer: int, number: int, q: torch.Tensor) -> torch.Tensor:
        """q [T, H, width] of shorts[number] -> [T, H, kv_rank]."""


class ReferenceLatentAttention(LatentBackend):
    """What is kept of each of `layers`, all of one `spec`: a tensor [num_blocks, BLOCK_SIZE, width], bf16 or
    float32."""

    rows_share = True

    def __init__(
        self, spec: Latent, layers: Sequence[int], num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._spec = spec
        self._on_gpu = device.type != "cpu"
        shape = (num_blocks, BLOCK_SIZE, spec.width)
        self.cache = {layer: torch.zeros(shape, dtype=dtype, device=device) for layer in layers}
        self._token_bytes = len(layers) * spec.cache.position_bytes(dtype.itemsize)
        self._long: list[RowPlan] = []
        self._short: list[RowPlan] = []
        self._slots: torch.Tensor | None = None

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
        rows, least = plan_rows(batch), self._spec.expands_from
        self._long, self._short = [], []
        for row in rows:
            long = least is not None and row.tokens.stop - row.tokens.start >= least
            (self._long if long else self._short).append(row)
        self.longs, self.shorts = ([row.tokens for row in those] for those in (self._long, self._short))
        self._slots = batch.slot_mapping

    def keep(self, layer: int, kept: torch.Tensor) -> None:
        if self._slots is None:
            raise RuntimeError("plan() comes before forward()")
        self.cache[layer].flatten(0, 1)[self._slots] = kept[:, 0]

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.keep(layer, k)
        out = torch.empty((*q.shape[:2], self._spec.kv_rank), dtype=q.dtype, device=q.device)
        for row in (*self._long, *self._short):
            out[row.tokens] = self._absorbed(layer, row, q[row.tokens])
        return out

    def expanded(self, layer: int, number: int, q: torch.Tensor, expand: Expand) -> torch.Tensor:
        row, spec = self._long[number], self._spec
        kept = self._kept(layer, row)
        k_nope, values = expand(kept[:, : spec.kv_rank])
        k_rope = kept[:, None, spec.kv_rank :].expand(-1, spec.heads, -1)
        return attended(q, torch.cat((k_nope, k_rope), dim=-1), values, row.mask, spec.scale)

    def absorbed(self, layer: int, number: int, q: torch.Tensor) -> torch.Tensor:
        return self._absorbed(layer, self._short[number], q)

    def _absorbed(self, layer: int, row: RowPlan, q: torch.Tensor) -> torch.Tensor:
        kept = self._kept(layer, row)
        return attended(q, kept[:, None], kept[:, None, : self._spec.kv_rank], row.mask, self._spec.scale)

    def _kept(self, layer: int, row: RowPlan) -> torch.Tensor:
        """What the cache has of a sequence [context, width]."""
        return self.cache[layer].flatten(0, 1)[row.gather]


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
