"""The contract between the model and whatever computes paged attention.

pages:    block b of layer l holds positions [16 i, 16 i + 16) of one sequence, if block_table[i] == b
a step:   plan(batch) once on the host, then forward(layer, q, k, v) per layer
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from engine.config import KV_BLOCK_TOKENS
from engine.errors import EngineError
from scheduler.plan import RowState

BLOCK_SIZE = KV_BLOCK_TOKENS


def kv_scale_bytes(kv_dtype: torch.dtype) -> int:
    """Beside each head's key, and value, of a position: an int8 cache has a float32 scale there."""
    return 4 if kv_dtype == torch.int8 else 0


@dataclass
class BatchLayout:
    """Where the step's T tokens of R rows live. Host-side lists and the same as tensors on the model's device.

    Row r owns tokens [row_starts[r], row_starts[r + 1]) of the flat batch, at positions
    [context_lens[r] - row_len, context_lens[r]) of its sequence.
    """

    row_starts: list[int]  # R + 1
    context_lens: list[int]  # R: positions in the cache after this step, this step's tokens included
    block_tables: list[array[int]]  # R
    positions: torch.Tensor  # int64 [T]
    slot_mapping: torch.Tensor  # int64 [T]: block * BLOCK_SIZE + offset of each token's own KV
    # Decode rows only, filled up with rows of a scratch block to a size that recurs; `positions` and `slot_mapping` are
    # at fixed addresses, and what `forward` launches may be captured in a CUDA graph and replayed after another `plan`.
    padded: bool = False
    states: list[RowState] = field(default_factory=list)  # R; none where the model keeps no states

    @property
    def num_rows(self) -> int:
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        return self.row_starts[-1]


def joined(tables: Iterable[array[int]], counts: Iterable[int]) -> NDArray[np.int32]:
    """The first blocks of each table, one table's after the other."""
    blocks = bytearray().join([table[:n] for table, n in zip(tables, counts, strict=True)])  # may be written to
    return np.frombuffer(blocks, np.int32)


def unit_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[units, ...], contiguous -> uint8 [units, bytes], a view."""
    return tensor.flatten(1).view(torch.uint8)


@dataclass(frozen=True)
class KvPlaces:
    """Where a step's keys and values belong."""

    keys: torch.Tensor  # [blocks, BLOCK_SIZE, G, D], contiguous; fp8: cut to its largest number
    values: torch.Tensor
    slots: torch.Tensor  # int64 [T], as `BatchLayout.slot_mapping`


class CacheBackend(ABC):
    """Owns what the layers that it was made for keep of sequences between steps."""

    captures: bool = False  # whether a padded batch's work may be captured in a CUDA graph
    rows_share: bool = False  # whether rows may be of one sequence: all keys and values are written before any is read
    notes: tuple[str, ...] = ()  # logged at start: how it computes

    @abstractmethod
    def plan(self, batch: BatchLayout) -> None:
        """Host-side work of a step, once, before the first layer of that step."""

    def host_planes(self) -> list[NDArray[np.uint8]]:
        """What is kept in host memory, as views [n, units, bytes]: what a unit (a block, or a slot of states) holds is
        plane[:, unit] of each. EngineError if it is elsewhere."""
        raise EngineError(f"{type(self).__name__} holds what it keeps outside host memory")

    def device_planes(self) -> list[torch.Tensor]:
        """What is kept in a GPU's memory, as views uint8 [units, bytes]: what a unit holds is plane[unit] of each.
        EngineError if it is elsewhere."""
        raise EngineError(f"{type(self).__name__} holds what it keeps outside a GPU's memory")

    def beside(self) -> CacheBackend:
        """Another of the same cache, for steps of prompts that are computed at the same time on another thread and
        stream. EngineError where one step at a time is computed."""
        raise EngineError(f"{type(self).__name__} computes one step at a time")

    @property
    @abstractmethod
    def kv_bytes_per_token(self) -> int:
        """Bytes of one position over all of its layers."""


class AttentionBackend(CacheBackend):
    """Owns the KV blocks of the layers that it was made for. H query heads, G KV heads, D head_dim; causal; scale
    1 / sqrt(D).

    Of latent attention, absorbed: one KV head of the width that the cache keeps, of whose keys the first kv_rank values
    are the values, too; v is these, and not kept again. The scale is the part's own."""

    @abstractmethod
    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write k, v [T, G, D] into their blocks, attend with q [T, H, D]; returns [T, H, D]. (Of latent attention v
        and what returns have kv_rank values.)"""

    def set_sinks(self, layer: int, sinks: torch.Tensor) -> None:
        """float32 [H] of a layer whose heads have sinks, before the first step."""
        raise EngineError(f"{type(self).__name__} computes attention without sinks")

    def places(self, layer: int) -> KvPlaces | None:
        """Where the caller may write the planned step's k and v itself, and call `attend`; None: by `forward` alone."""
        return None

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """`forward` behind a caller who has written k and v. Only where there are `places`."""
        raise EngineError(f"{type(self).__name__} writes keys and values itself: call forward")
