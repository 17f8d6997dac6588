"""The projection from latents to keys and values of all heads (kv_b) in torch, which can expand the cache, too."""

from __future__ import annotations

import torch

from engine.linear.base import LatentUp, LoraBatch
from engine.lora.adapter import LoraPair


class TorchLatentUp(LatentUp):
    """weight [H, nope + value, kv_rank] on any device. LoRA runs in float32 and is added before rounding."""

    def __init__(self, weight: torch.Tensor, nope: int) -> None:
        self._keys, self._values = weight[:, :nope], weight[:, nope:]
        self._nope = nope
        self._pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # A [r, kv_rank], s B [H, nope + value, r]

    def absorb(self, q: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        out = torch.bmm(q.transpose(0, 1), self._keys).transpose(0, 1)
        for slot, rows in lora.groups if lora is not None else ():
            if pair := self._pair(slot):
                a, b = pair
                small = torch.einsum("thn,hnr->thr", q[rows].float(), b[:, : self._nope])
                out[rows] = (out[rows].float() + small @ a).to(out.dtype)
        return out

    def values(self, mixed: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        out = torch.bmm(mixed.transpose(0, 1), self._values.transpose(1, 2)).transpose(0, 1)
        for slot, rows in lora.groups if lora is not None else ():
            if pair := self._pair(slot):
                a, b = pair
                small = mixed[rows].float() @ a.T
                more = torch.einsum("thr,hvr->thv", small, b[:, self._nope :])
                out[rows] = (out[rows].float() + more).to(out.dtype)
        return out

    @property
    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What `absorb` and `values` multiply with: K_h^T [H, kv_rank, nope], V_h [H, value, kv_rank]."""
        return self._keys.transpose(1, 2), self._values

    def expand(self, latents: torch.Tensor, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [S, kv_rank] of a sequence -> its k_nope [S, H, nope] and v [S, H, value]."""
        keys = torch.einsum("sc,hnc->shn", latents, self._keys)
        values = torch.einsum("sc,hvc->shv", latents, self._values)
        if pair := self._pair(slot):
            a, b = pair
            more = torch.einsum("sr,hor->sho", latents.float() @ a.T, b)
            keys = (keys.float() + more[..., : self._nope]).to(keys.dtype)
            values = (values.float() + more[..., self._nope :]).to(values.dtype)
        return keys, values

    def _pair(self, slot: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self._pairs.get(slot)

    def set_adapter(self, slot: int, pair: LoraPair | None) -> None:
        if pair is None:
            self._pairs.pop(slot, None)
            return
        device, heads = self._keys.device, self._keys.shape[0]
        b = (pair.b.float() * pair.scale).to(device).reshape(heads, -1, pair.rank)
        self._pairs[slot] = (pair.a.float().to(device), b)
