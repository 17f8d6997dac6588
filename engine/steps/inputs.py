"""A step's inputs as arrays on the host, built once from its plan, for plain and padded steps alike.

plan    row A: 1 token    row B: tokens 32 33 34    row C: 1 token and 2 drafts
tokens  A                 B32 B33 B34               C C' C"
kept    A                         B34               C C' C"     what sampling needs
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.base import BLOCK_SIZE, BatchLayout
from engine.device import to_device
from engine.linear.base import LoraBatch
from engine.linear.segments import Groups, Segments
from scheduler.plan import RowState, StepPlan, StepRow

Array = NDArray[np.int64]
_ROOM = 64  # tokens that a request's counts have room for at first, beside the prompt's


@dataclass(frozen=True)
class StepArrays:
    """T tokens of R rows. Row r owns tokens [row_starts[r], row_starts[r + 1]) and of the kept ones
    [kept_starts[r], kept_starts[r + 1])."""

    row_starts: Array  # [R + 1]
    context_lens: Array  # [R]
    block_tables: list[array[int]]  # R
    ids: Array  # [T]; 0 where the token is still on the device
    sources: Array  # [T]: its place there, among the tokens last sampled; -1: it is in `ids`
    positions: Array  # [T]
    slot_mapping: Array  # [T]: block * BLOCK_SIZE + offset
    adapters: Array  # [T]: adapter slot, 0 = base
    kept: Array  # [K], rising: the tokens after which something is sampled
    kept_starts: Array  # [R + 1]
    pending: bool  # whether some token is still on the device
    adapted: bool  # whether some adapter slot is not 0
    states: list[RowState] = field(default_factory=list)  # [R]; none where the model keeps no states

    @classmethod
    def of(cls, plan: StepPlan, sampled: Mapping[str, int]) -> StepArrays:
        """`sampled`: by request id, the place of a token that the step before is still to deliver."""
        rows = plan.rows
        if plan.single:
            return cls._single(plan, sampled)
        starts = np.fromiter((row.start for row in rows), np.int64, len(rows))
        lengths = np.fromiter((row.num_tokens for row in rows), np.int64, len(rows))
        samples = np.fromiter((row.num_samples for row in rows), np.int64, len(rows))
        slots = np.fromiter((row.adapter_slot for row in rows), np.int64, len(rows))
        row_starts, ends = _offsets(lengths), starts + lengths
        positions = _ranges(starts, lengths)
        ids, sources = _ids(rows, row_starts, sampled)
        return cls(
            row_starts=row_starts,
            context_lens=ends,
            block_tables=plan.block_tables,
            ids=ids,
            sources=sources,
            positions=positions,
            slot_mapping=_slot_mapping(plan, starts, ends, positions),
            adapters=np.repeat(slots, lengths),
            kept=_ranges(row_starts[1:] - samples, samples),
            kept_starts=_offsets(samples),
            pending=bool(np.any(sources >= 0)),
            adapted=bool(np.any(slots)),
            states=_states(rows),
        )

    @classmethod
    def _single(cls, plan: StepPlan, sampled: Mapping[str, int]) -> StepArrays:
        """Rows of one token each, after which something is sampled. What `of` would make of them, without arithmetic on
        arrays of few elements, which costs more than a small model's step has to spare."""
        upto = np.arange(len(plan.rows) + 1)
        starts = [row.start for row in plan.rows]
        slots = [
            table[start // BLOCK_SIZE] * BLOCK_SIZE + start % BLOCK_SIZE
            for table, start in zip(plan.block_tables, starts, strict=True)
        ]
        pending = [row.request.num_in_flight > 1 for row in plan.rows]  # of the step before, beside this one's
        tokens = [
            0 if on_device else row.request.token(row.start) for row, on_device in zip(plan.rows, pending, strict=True)
        ]
        sources = [
            sampled[row.request.request_id] if on_device else -1
            for row, on_device in zip(plan.rows, pending, strict=True)
        ]
        positions, adapters = np.array(starts, np.int64), [row.adapter_slot for row in plan.rows]
        return cls(
            row_starts=upto,
            context_lens=positions + 1,
            block_tables=plan.block_tables,
            ids=np.array(tokens, np.int64),
            sources=np.array(sources, np.int64),
            positions=positions,
            slot_mapping=np.array(slots, np.int64),
            adapters=np.array(adapters, np.int64),
            kept=upto[:-1],
            kept_starts=upto,
            pending=any(pending),
            adapted=any(adapters),
            states=_states(plan.rows),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def last_kept(self) -> Array:
        """Of each row that samples: which of the kept tokens is its last."""
        return self.kept_starts[1:][np.diff(self.kept_starts) > 0] - 1

    @property
    def single(self) -> bool:
        """Whether every row is one token, after which something is sampled."""
        return len(self.kept) == self.num_tokens == len(self.context_lens)

    @property
    def one_each(self) -> bool:
        """Whether every row samples once."""
        return self.single or np.array_equal(self.kept_starts, np.arange(len(self.context_lens) + 1))

    def layout(self, device: torch.device) -> BatchLayout:
        return BatchLayout(
            row_starts=self.row_starts.tolist(),
            context_lens=self.context_lens.tolist(),
            block_tables=self.block_tables,
            positions=to_device(self.positions, torch.int64, device),
            slot_mapping=to_device(self.slot_mapping, torch.int64, device),
            states=self.states,
        )

    def token_ids(self, sampled: torch.Tensor) -> torch.Tensor:
        """int64 [T] on the device of `sampled`, where tokens that the host does not know are copied from it."""
        ids = to_device(self.ids, torch.int64, sampled.device)
        if self.pending:
            targets = np.flatnonzero(self.sources >= 0)
            places = to_device(self.sources[targets], torch.int64, sampled.device)
            # a negative one was not sampled: its request ends before this step does
            ids[to_device(targets, torch.int64, sampled.device)] = sampled[places].clamp(min=0)
        return ids

    def lora(self, device: torch.device) -> LoraBatch | None:
        """None for a batch of the base alone."""
        if not self.adapted:
            return None
        groups, segments = Groups.of(self.adapters), None
        if device.type == "cuda":
            order, tiles = (to_device(part, torch.int32, device) for part in (groups.order, groups.tiles))
            segments = Segments(order, tiles)
        return LoraBatch(to_device(self.adapters, torch.int32, device), groups.tokens(device), segments)


class TokenCounts:
    """A request's distinct tokens, those of the prompt first, and how often each occurs in its output. Arrays that grow
    with the output: a step adds to them, and goes through none of it again."""

    def __init__(self, prompt: list[int]) -> None:
        distinct = np.unique(np.array(prompt, np.int64))
        self._size = len(distinct)
        self._tokens: Array = np.concatenate((distinct, np.zeros(_ROOM, np.int64)))
        self._counts: Array = np.zeros(len(self._tokens), np.int64)
        self._places = {token: place for place, token in enumerate(distinct.tolist())}
        self._counted = 0

    def update(self, output: list[int]) -> None:
        for token in output[self._counted :]:
            place = self._places.setdefault(token, self._size)
            if place == self._size:
                if place == len(self._tokens):
                    more = np.zeros(place, np.int64)
                    self._tokens = np.concatenate((self._tokens, more))
                    self._counts = np.concatenate((self._counts, more))
                self._tokens[place] = token
                self._size += 1
            self._counts[place] += 1
        self._counted = len(output)

    def seen(self, drafts: Sequence[int] = ()) -> tuple[Array, Array]:
        """(tokens, counts), as if `drafts` had followed the output. Without them they are views of what grows."""
        tokens, counts = self._tokens[: self._size], self._counts[: self._size]
        if not drafts:
            return tokens, counts
        new = dict.fromkeys((token for token in drafts if token not in self._places), 0)
        tokens = np.concatenate((tokens, np.fromiter(new, np.int64, len(new))))
        counts = np.concatenate((counts, np.zeros(len(new), np.int64)))
        places = self._places | {token: self._size + i for i, token in enumerate(new)}
        for token in drafts:
            counts[places[token]] += 1
        return tokens, counts


def _states(rows: list[StepRow]) -> list[RowState]:
    """Rows of one model have states, or none has."""
    if not rows or rows[0].state is None:
        return []
    return [row.state for row in rows if row.state is not None]


def _offsets(lengths: Array) -> Array:
    """[n] -> [n + 1]: 0, and the sums so far."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))


def _ranges(starts: Array, lengths: Array) -> Array:
    """start, start + 1, ... of each, one after the other."""
    return np.arange(lengths.sum()) + np.repeat(starts - _offsets(lengths)[:-1], lengths)


def _ids(rows: list[StepRow], row_starts: Array, sampled: Mapping[str, int]) -> tuple[Array, Array]:
    ids, sources = np.zeros(row_starts[-1], np.int64), np.full(row_starts[-1], -1, np.int64)
    for row, (begin, end) in zip(rows, pairwise(row_starts.tolist()), strict=True):
        drafts = end - len(row.drafts)
        known = row.request.tokens(row.start, row.start + drafts - begin)
        ids[begin : begin + len(known)] = known
        ids[drafts:end] = row.drafts
        if len(known) < drafts - begin:  # one: the step before is about to sample it
            sources[drafts - 1] = sampled[row.request.request_id]
    return ids, sources


def _slot_mapping(plan: StepPlan, starts: Array, ends: Array, positions: Array) -> Array:
    first, counts = starts // BLOCK_SIZE, -(-ends // BLOCK_SIZE) - starts // BLOCK_SIZE
    cuts = zip(plan.block_tables, first.tolist(), (first + counts).tolist(), strict=True)
    blocks = np.frombuffer(b"".join([table[a:b] for table, a, b in cuts]), np.int32).astype(np.int64)
    place = positions // BLOCK_SIZE + np.repeat(_offsets(counts)[:-1] - first, ends - starts)
    return blocks[place] * BLOCK_SIZE + positions % BLOCK_SIZE
