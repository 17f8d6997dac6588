"""The projection from latents to keys and values of all heads (kv_b), by heads: beside absorbed attention, which never
expands the cache, and to expand it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from engine.lora.adapter import LoraPair

if TYPE_CHECKING:
    from engine.linear.base import LoraBatch


class Adapted(ABC):
    """What an adapter's pair of a module is put into."""

    captures: bool = False  # whether a call may be captured in a CUDA graph that serves any adapters

    @abstractmethod
    def set_adapter(self, slot: int, pair: LoraPair | None) -> None:
        """Put a pair into a slot that no step in flight uses, or clear it (None)."""


class LatentUp(Adapted):
    """Per head h: k_nope = K_h c, v = V_h c of a latent c, with K_h [nope, kv_rank], V_h [value, kv_rank]; rows with an
    adapter have (K_h + s B_h A) in place of K_h, and likewise V_h, computed through A."""

    @abstractmethod
    def absorb(self, q: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        """Queries [T, H, nope] -> K_h^T q [T, H, kv_rank], which meet latents instead of keys."""

    @abstractmethod
    def values(self, mixed: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        """Sums of latents [T, H, kv_rank] -> V_h mixed [T, H, value]."""


class TorchLatentUp(LatentUp):
    """weight [H, nope + value, kv_rank] on any device. LoRA runs in float32 and is added before rounding."""

    def __init__(self, weight: torch.Tensor, nope: int) -> None:
        self._keys, self._values = weight[:, :nope], weight[:, nope:]
        self._nope = nope
        self._pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # A [r, kv_rank], s B [H, nope + value, r]

    def absorb(self, q: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        out = torch.einsum("thn,hnc->thc", q, self._keys)
        for slot, rows in lora.groups if lora is not None else ():
            if slot in self._pairs:
                a, b = self._pairs[slot]
                small = torch.einsum("thn,hnr->thr", q[rows].float(), b[:, : self._nope])
                out[rows] = (out[rows].float() + small @ a).to(out.dtype)
        return out

    def values(self, mixed: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        out = torch.einsum("thc,hvc->thv", mixed, self._values)
        for slot, rows in lora.groups if lora is not None else ():
            if slot in self._pairs:
                a, b = self._pairs[slot]
                small = mixed[rows].float() @ a.T
                more = torch.einsum("thr,hvr->thv", small, b[:, self._nope :])
                out[rows] = (out[rows].float() + more).to(out.dtype)
        return out

    def expand(self, latents: torch.Tensor, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [S, kv_rank] of a sequence -> its k_nope [S, H, nope] and v [S, H, value]."""
        keys = torch.einsum("sc,hnc->shn", latents, self._keys)
        values = torch.einsum("sc,hvc->shv", latents, self._values)
        if slot in self._pairs:
            a, b = self._pairs[slot]
            more = torch.einsum("sr,hor->sho", latents.float() @ a.T, b)
            keys = (keys.float() + more[..., : self._nope]).to(keys.dtype)
            values = (values.float() + more[..., self._nope :]).to(values.dtype)
        return keys, values

    def set_adapter(self, slot: int, pair: LoraPair | None) -> None:
        if pair is None:
            self._pairs.pop(slot, None)
            return
        device, heads = self._keys.device, self._keys.shape[0]
        b = (pair.b.float() * pair.scale).to(device).reshape(heads, -1, pair.rank)
        self._pairs[slot] = (pair.a.float().to(device), b)
