"""The contract of a dense projection with per-row adapters: attention, router, dense MLPs, lm_head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from engine.linear.embedding import Embedding
from engine.linear.segments import Segments
from engine.lora.adapter import LoraPair
from engine.ops.base import RowAdapters
from engine.weights.store import WeightTensor


@dataclass(frozen=True)
class LoraBatch:
    """Which adapter each of the step's T tokens uses. Made once a step, read by every projection.

    `groups` lists the slots that occur, without 0, each with the indices of its tokens; empty for a base-only batch.
    """

    slots: torch.Tensor  # int32 [T]
    groups: list[tuple[int, torch.Tensor]]  # (slot, int64 indices)
    segments: Segments | None = None  # the same for the segmented kernels of a GPU

    @cached_property
    def host_slots(self) -> list[int]:
        """`slots`; waits for the device, once a step."""
        return [int(slot) for slot in self.slots.tolist()]

    def rows(self, keep: torch.Tensor) -> LoraBatch:
        """Of the tokens `keep` (int64 [K]) alone, in that order; without segments, which a CPU does not read."""
        slots = self.slots[keep]
        found = [(slot, torch.where(slots == slot)[0]) for slot, _ in self.groups]
        return LoraBatch(slots, [(slot, tokens) for slot, tokens in found if tokens.numel()])


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


class Linear(Adapted):
    """y = x W^T (+ bias) + scale_s (x A_s^T) B_s^T for the row's slot s. x [T, in] -> [T, out], x's dtype."""

    @property
    def plain(self) -> torch.Tensor | None:
        """W [out, in] on the device, if y = x W^T is all there is to a batch without adapters; else None."""
        return None

    def adapters_of(self, lora: LoraBatch) -> RowAdapters | None:
        """Beside `plain`, for kernels that add the rows' adapters themselves; None where only a call adds them."""
        return None

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Without adapters, into `out` [T, out]."""
        out.copy_(self(x, None))

    @abstractmethod
    def __call__(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor: ...


class LinearBackend(ABC):
    """Makes projections. One kernel family; keeps what they share."""

    def join(self, linears: Sequence[Linear]) -> Callable[[torch.Tensor, LoraBatch | None], list[torch.Tensor]]:
        """One call for projections (at most three) of this backend that share x. Called once, after they are loaded."""
        return lambda x, lora: [linear(x, lora) for linear in linears]

    @abstractmethod
    def load(self, name: str, weight: WeightTensor, bias: WeightTensor | None) -> Linear:
        """weight [out, in] in any readable type."""

    @abstractmethod
    def latent_up(self, name: str, weight: WeightTensor, heads: int, nope: int) -> LatentUp:
        """weight [heads x (nope + value), kv_rank] in any readable type: a head's rows of keys, then of values."""

    def embedding(self, name: str, weight: WeightTensor, head: Linear | None) -> Embedding | None:
        """weight [V, H] for looking rows up in a form smaller than a table of numbers, or None if this backend has
        none. `head`: the projection made of this very weight, if there is one, whose memory may serve both."""
        return None
