"""What the scheduler hands to the engine, and what it says of requests afterwards."""

from __future__ import annotations

import enum
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import msgspec

from scheduler.request import AdapterKey, Request

NO_STATE = -1


class RowState(msgspec.Struct, frozen=True, gc=False):
    """Of a model whose layers keep states of sequences: where a row's is. It begins from slot `source` (NO_STATE: with
    nothing, at position 0) and ends in `slot`; `saves`: (position, slot), rising, where a copy of the state as it is
    before that position goes; start - replayed < position <= start + num_tokens. `replayed`: so many positions before
    the row are not in the state yet, and are put into it first: those of accepted drafts, whose inputs the slot has
    kept. `keeps`: the row has drafts, so the slot keeps its inputs, and its state stays as it is before the row."""

    slot: int
    source: int
    saves: tuple[tuple[int, int], ...] = ()
    replayed: int = 0
    keeps: bool = False


class Idle(NamedTuple):
    """Blocks and slots of snapshots of which nothing is needed any more, whose memory goes back to the system before
    the step; what the step writes into them takes it again."""

    blocks: list[int]
    slots: list[int]


class Wanted(NamedTuple):
    """Drafts behind an output of at least `after` tokens, at most `most`."""

    after: int
    most: int


class StepRow(msgspec.Struct, frozen=True, gc=False):
    """One request's part of a step: positions [start, start + num_tokens), of which the last hold the drafts.

    A row that samples samples after its last token and after each draft, `num_samples` tokens.
    """

    request: Request
    start: int
    num_tokens: int
    adapter_slot: int  # 0 = base
    samples: bool  # False for a prefill chunk that is not the last one
    drafts: tuple[int, ...] = ()  # of a decode row: tokens that are computed although they may turn out wrong
    state: RowState | None = None  # None: the model keeps none

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == 1 + len(self.drafts) and self.start >= len(self.request.prompt)

    @property
    def num_samples(self) -> int:
        return 1 + len(self.drafts) if self.samples else 0

    def token(self, position: int) -> int | None:
        """The token at one of the row's positions, or None while the step before is still to deliver it."""
        draft = position - (self.start + self.num_tokens - len(self.drafts))
        return self.drafts[draft] if draft >= 0 else self.request.token(position)


def pairs(start: int, num_tokens: int) -> int:
    """Of tokens at [start, start + num_tokens) and the positions that each of them reads: those up to itself."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True)
class StepPlan:
    """A flat token batch, decode rows first, prefill chunks after.

    A decode row's token may still be on the device (`row.token(start)` is None): it is the one that the step
    before is about to sample for the same request; such a row has no drafts. `block_tables[i]` is row i's blocks
    as they were when the step was planned, long enough for start + num_tokens positions. `wanted`: drafts that
    are of use behind a request's row, where the model makes them.
    """

    step: int
    rows: list[StepRow]
    block_tables: list[array[int]]
    idle: Idle | None = None  # None: nothing is
    ahead: bool = False  # planned while the step before was in flight
    prompts: bool = False  # in the lane of long prompts, beside other steps
    follows: bool = False  # of that lane: it reads what a step of the other lane is still computing
    wanted: Mapping[str, Wanted] = field(default_factory=dict)  # by request id; absent: as many as can be made

    @cached_property
    def num_tokens(self) -> int:
        return sum([row.num_tokens for row in self.rows])

    @cached_property
    def single(self) -> bool:
        """Whether every row is one token, after which something is sampled."""
        return all(row.samples and row.num_tokens == 1 for row in self.rows)

    @cached_property
    def num_read(self) -> int:
        """Pairs of a token and a position that it reads: those up to itself."""
        if self.single:
            return sum([row.start for row in self.rows]) + len(self.rows)
        return sum(pairs(row.start, row.num_tokens) for row in self.rows)

    @cached_property
    def num_decodes(self) -> int:
        """Rows before the first prefill chunk."""
        return bisect_left(self.rows, True, key=lambda row: not row.is_decode)


@dataclass(frozen=True)
class SlotLoad:
    """The engine is to make `adapter` resident in `slot`, then call `slot_loaded` or `slot_failed`."""

    slot: int
    adapter: AdapterKey


class Save(NamedTuple):
    """The engine is to write what `block` holds, or (`state`) that slot of states, to disk as `key`, then call `saved`;
    until then it does not change."""

    key: bytes
    block: int
    state: bool = False


class Drop(NamedTuple):
    """The engine is to delete what is on disk as `key`, in order with the saves."""

    key: bytes


@dataclass(frozen=True, eq=False)
class Fetch:
    """The engine is to read what is on disk as each key into its block, and `state` into its slot of states, then call
    `fetched`."""

    parts: tuple[tuple[bytes, int], ...]
    state: tuple[bytes, int] | None = None


DiskOrder = Save | Drop | Fetch


class EventKind(enum.Enum):
    TOKENS = "tokens"
    FINISHED = "finished"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something that happened to a request. Every request gets any number of TOKENS and exactly one other."""

    kind: EventKind
    request: Request
    # TOKENS; also FINISHED: the tokens committed with it. An end-of-sequence or stop token is never among them.
    tokens: list[int] = []
    reason: str = ""  # FINISHED: "stop" or "length"; otherwise a sentence for the user
    retry_after_s: float | None = None  # REFUSED because the queue was full
    stop_token: int | None = None  # FINISHED "stop": the token that ended it, which is not part of the output


class AdmissionError(Exception):
    """A request that is not taken. `code` is "queue_full", "too_long", "duplicate", "empty_prompt",
    "no_adapter_slots" or "invalid_weight"."""

    def __init__(self, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s
