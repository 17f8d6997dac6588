"""What rank 0 tells the others: how decode steps run, then each step before it launches it; and what they answer while
they start."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import NoReturn, Protocol

import msgspec
import numpy as np

from engine.attention.base import BLOCK_SIZE, joined
from engine.steps.inputs import Array, StepArrays
from scheduler.plan import Idle, RowState

_PARTS = ("row_starts", "context_lens", "positions", "slot_mapping", "adapters", "kept", "kept_starts")


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """From a rank: its part of the model is loaded, or why it is not; `user`, `field`: as of a UserError."""

    error: str = ""
    user: bool = False
    field: str | None = None


class Begin(msgspec.Struct, tag=True, frozen=True):
    """All ranks have loaded. `decode`: as `cuda_graphs` of the settings, decided for all ranks."""

    decode: str


class Prepared(msgspec.Struct, tag=True, frozen=True):
    """From a rank: it waits for steps."""


class Step(msgspec.Struct, tag=True, frozen=True):
    """A step as `ModelRunner` runs it; token ids come with it over the group. `logits` of these tokens' hidden states
    are computed after it: (first, end)."""

    sizes: list[int]
    numbers: bytes  # int64, the arrays of _PARTS one after the other
    tables: bytes  # int32, the blocks that each row's positions take, one row's after the other
    padded: bool
    every: bool  # the hidden states of all tokens are kept
    greedy: bool
    logits: list[tuple[int, int]] = []
    states: list[RowState] = []  # of the rows, where the model keeps some; slots are the same on all ranks
    idle: Idle | None = None  # as of StepPlan

    @classmethod
    def of(
        cls,
        arrays: StepArrays,
        *,
        padded: bool,
        every: bool,
        greedy: bool,
        logits: list[tuple[int, int]],
        idle: Idle | None,
    ) -> Step:
        parts: list[Array] = [getattr(arrays, name) for name in _PARTS]
        return cls(
            [len(part) for part in parts],
            np.concatenate(parts).astype(np.int64, copy=False).tobytes(),
            joined(arrays.block_tables, _pages(arrays.context_lens).tolist()).tobytes(),
            padded,
            every,
            greedy,
            logits,
            arrays.states,
            idle,
        )

    @property
    def arrays(self) -> StepArrays:
        """With zeros for the token ids."""
        numbers = np.frombuffer(bytearray(self.numbers), np.int64)
        parts = dict(zip(_PARTS, np.split(numbers, np.cumsum(self.sizes)[:-1]), strict=True))
        tokens = len(parts["positions"])
        ids, sources = np.zeros(tokens, np.int64), np.full(tokens, -1, np.int64)
        blocks, ends = array("i", self.tables), [0, *np.cumsum(_pages(parts["context_lens"])).tolist()]
        tables = [blocks[begin:end] for begin, end in pairwise(ends)]
        adapted = bool(np.any(parts["adapters"]))
        return StepArrays(
            ids=ids, sources=sources, block_tables=tables, pending=False, adapted=adapted, states=self.states, **parts
        )


def _pages(context_lens: Array) -> Array:
    return -(-context_lens // BLOCK_SIZE)


class StepLeader(Protocol):
    """What rank 0 has to tell the others through (`engine.launch.leader`)."""

    def announce(self, step: Step) -> None: ...

    def lost(self, error: BaseException) -> NoReturn: ...


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Loaded | Begin | Prepared | Step).decode
