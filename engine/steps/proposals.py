"""Draft tokens of the model's own layer of multi-token prediction, behind each step.

    step       positions 5 6 7, token 8 was sampled    hidden states 5 6 7, tokens 6 7 8 -> a guess at token 9
    afterwards position 8                              what it returned for 7, the guess -> a guess at token 10, ...

The layer runs over all of a step's positions but those of wrong drafts, prompts' too, for it attends to what it has
kept of the positions before. What it keeps of a guess is written again when the model itself gets there. Where that
position has no block of the sequence yet, it goes to a scratch block of the row.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.base import BLOCK_SIZE, BatchLayout
from engine.device import Arrival, to_device, to_host
from engine.model.causal_lm import CausalLM
from engine.ops.greedy import greedy_tokens
from engine.steps.inputs import StepArrays
from scheduler.plan import StepPlan, Wanted

# By request id its drafts, each as a host tensor that is valid once the stream has got there, and the place in it.
_Guesses = dict[str, list[tuple[torch.Tensor, int]]]


@dataclass(frozen=True)
class _Row:
    request_id: str
    first: int  # its first token in the step's batch
    start: int  # that token's position
    following: list[int]  # the token after each of its positions that count, the last one's sampled as a rule
    most: int  # drafts that are of use behind it
    table: array[int]

    @property
    def end(self) -> int:
        return self.start + len(self.following)


class Proposals:
    """At most `num_drafts` of each of `max_rows` rows. `scratch`: blocks that belong to no request, for each row as
    many as `num_drafts` - 1 positions take."""

    def __init__(self, model: CausalLM, num_drafts: int, max_rows: int, scratch: range) -> None:
        self._model = model
        self._num_drafts = num_drafts
        self._begun = 0  # runs of the layer behind this step
        self._scratch = [array("i", scratch[i::max_rows]) for i in range(max_rows)]

    def propose(
        self, plan: StepPlan, arrays: StepArrays, hidden: torch.Tensor, tokens: Sequence[list[int]], failed: set[str]
    ) -> dict[str, list[int]]:
        """Behind a step that has ended: by request id what may follow its last token. `hidden` [T, H] of the step's
        tokens; `tokens` of each row as `ModelRunner.tokens` has them. Rows of requests that `failed` are left out."""
        rows = self._rows(plan, arrays, tokens, failed)
        if not rows:
            return {}
        self._begun = 0
        try:
            drafts = self._proposed(rows, arrays, hidden)
        except Exception:
            self._end()  # says why, if an expert backend knows
            raise
        self._end()
        return {name: _valid([int(guess[place]) for guess, place in found]) for name, found in drafts.items()}

    def _proposed(self, rows: list[_Row], arrays: StepArrays, hidden: torch.Tensor) -> _Guesses:
        device = self._model.device
        places = np.concatenate([np.arange(row.first, row.first + len(row.following)) for row in rows])
        if len(places) < arrays.num_tokens:
            hidden = hidden[to_device(places, torch.int64, device)]
        ids = to_device([token for row in rows for token in row.following], torch.int64, device)
        out = self._predict(ids, hidden, self._layout(rows, arrays, places))
        ends = np.cumsum([len(row.following) for row in rows]) - 1
        asked = [i for i, row in enumerate(rows) if row.most > 0]
        return self._guess([rows[i] for i in asked], out[to_device(ends[asked], torch.int64, device)]) if asked else {}

    def _predict(self, ids: torch.Tensor, hidden: torch.Tensor, batch: BatchLayout) -> torch.Tensor:
        self._begun += 1
        return self._model.predict(ids, hidden, batch)

    def _end(self) -> None:
        """Waits for what was launched."""
        Arrival(self._model.device).wait()
        for _ in range(self._begun):
            self._model.check()

    def _rows(self, plan: StepPlan, arrays: StepArrays, tokens: Sequence[list[int]], failed: set[str]) -> list[_Row]:
        rows, firsts = [], arrays.row_starts[:-1].tolist()
        for row, table, first, new in zip(plan.rows, plan.block_tables, firsts, tokens, strict=True):
            request, end = row.request, row.start + row.num_tokens - len(row.drafts)
            if request.request_id in failed:
                continue
            following = request.tokens(row.start + 1, end) + new
            if not row.samples:
                # a prompt of which only log-probabilities are asked has no token behind its last one
                following += request.tokens(end, end + 1) or request.tokens(end - 1, end)
            output = len(request.output) + len(new)
            wanted = plan.wanted.get(request.request_id, Wanted(0, self._num_drafts))
            most = min(wanted.most, request.most_output - output - 1) if new and output >= wanted.after else 0
            rows.append(_Row(request.request_id, first, row.start, following, most, table))
        return rows

    def _layout(self, rows: list[_Row], arrays: StepArrays, places: NDArray[np.int64]) -> BatchLayout:
        device = self._model.device
        return BatchLayout(
            row_starts=[0, *np.cumsum([len(row.following) for row in rows]).tolist()],
            context_lens=[row.end for row in rows],
            block_tables=[row.table for row in rows],
            positions=to_device(arrays.positions[places], torch.int64, device),
            slot_mapping=to_device(arrays.slot_mapping[places], torch.int64, device),
        )

    def _guess(self, rows: list[_Row], hidden: torch.Tensor) -> _Guesses:
        """`hidden` [R, H] behind each row's last token."""
        model, found = self._model, {row.request_id: list[tuple[torch.Tensor, int]]() for row in rows}
        rows = [replace(row, table=row.table + more) for row, more in zip(rows, self._scratch, strict=False)]
        for depth in range(1, self._num_drafts + 1):
            guesses = greedy_tokens(model.logits(hidden))
            on_host = to_host(guesses)
            for place, row in enumerate(rows):
                found[row.request_id].append((on_host, place))
            more = [place for place, row in enumerate(rows) if row.most > depth]
            if not more:
                break
            if len(more) < len(rows):
                kept = to_device(more, torch.int64, model.device)
                rows, guesses, hidden = [rows[place] for place in more], guesses[kept], hidden[kept]
            hidden = self._predict(guesses.clamp(min=0), hidden, self._next(rows, depth))
        return found

    def _next(self, rows: list[_Row], depth: int) -> BatchLayout:
        """One token of each row, `depth` positions behind its last one of the step; its table reaches so far."""
        positions = [row.end - 1 + depth for row in rows]
        slots = [
            row.table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for row, position in zip(rows, positions, strict=True)
        ]
        device = self._model.device
        return BatchLayout(
            row_starts=list(range(len(rows) + 1)),
            context_lens=[position + 1 for position in positions],
            block_tables=[row.table for row in rows],
            positions=to_device(positions, torch.int64, device),
            slot_mapping=to_device(slots, torch.int64, device),
        )


def _valid(guesses: list[int]) -> list[int]:
    """Those before the first that is no token: its logits are not finite."""
    return guesses[: next((i for i, guess in enumerate(guesses) if guess < 0), len(guesses))]
