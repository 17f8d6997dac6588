"""How many drafts a step checks: those that raise the expected tokens a second.

    tokens a second with D drafts = (rows + expected accepted drafts) / seconds(rows, D)

Each draft brings experts of its own and a row to compute, so what a step takes is measured, not assumed: relative to
one of as many rows without drafts, by the number of rows and of drafts. Where nothing was measured yet, a draft is
taken to cost a fifth of a row: it is tried only where it is likely to be right. What trying costs is bounded: drafts
that lost more than that are left out until the steps since have made up for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

LEVELS = (0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1)  # a level takes the drafts that are right with at least this chance
MIXED_LEVEL = 0.5  # beside prefill, which reads most experts anyway
MOST_DRAFTS = 128  # of a step: logits are computed for each of them
MARGIN = 1.04  # what is expected of them, at least, so that the scatter of steps costs nothing
FIRST_COST = 0.2  # of a draft, in rows
SURPRISE = 2.0  # a step counts as at most so many times longer or shorter than those before
WEIGHT = 1 / 4  # of the newest step
FORGET = 0.998  # a cost is believed less with each step since it was measured: one slow step must not stop drafts
STEP_UP = 2.0  # times as many drafts as any step had before, at most
CREDIT, SHARE = 2.0, 0.01  # what drafts may lose: so many steps, and of all steps so many more
MOST_LOST = 20.0  # steps that one is taken to have lasted, at most
REFRESH = 64  # steps with drafts, after which one without them is measured again


class Offer(NamedTuple):
    """Drafts of one row: how many there are, and the chance of each of being right if those before it are; `checked`:
    the chance that they will be checked, if they are to follow a token that is not known yet."""

    drafts: int
    chance: float
    checked: float = 1.0


@dataclass
class _Plain:
    seconds: float
    age: int = 0  # steps with drafts since it was measured


@dataclass
class _Extra:
    """What `drafts` drafts added to a step, as a share of one without."""

    drafts: float
    cost: float
    step: int  # when it was measured


class Gain:
    """Seconds come from the caller; deterministic."""

    def __init__(self) -> None:
        self._plain: dict[int, _Plain] = {}  # by rows
        self._extra: dict[int, dict[int, _Extra]] = {}  # by bit length of rows, by size of drafts
        self._steps = 0
        self._overlaps = False  # steps without drafts are planned ahead
        self._lost = 0.0  # to drafts that cost more than they saved, lately, in steps without drafts

    def choose(self, offers: Sequence[Offer], rows: int, *, mixed: bool) -> list[int]:
        """Drafts of each offer for a step in which `rows` rows decode; `mixed`: beside prefill."""
        none = [0] * len(offers)
        if mixed:
            return _within(offers, MIXED_LEVEL, MOST_DRAFTS)
        plain = self._plain.get(rows)
        if plain is None or plain.age >= REFRESH or self._lost > CREDIT:
            return none
        sizes = self._extra.get(rows.bit_length(), {})
        most = min(MOST_DRAFTS, STEP_UP * max([rows / STEP_UP, *(extra.drafts for extra in sizes.values())]))
        best, rate = none, rows * MARGIN
        for level in LEVELS:
            counts = _within(offers, level, most)
            if drafts := sum(counts):
                expected = sum(
                    offer.checked * _expected(offer.chance, n) for offer, n in zip(offers, counts, strict=True)
                )
                reached = (rows + expected) / (1 + self._cost(rows, drafts))
                if reached > rate:
                    best, rate = counts, reached
        return best

    def observe(self, rows: int, drafts: int, tokens: int, seconds: float, *, ahead: bool = False) -> float:
        """A step of decode rows alone took so long, and so many tokens came of it. `ahead`: planned while another one
        was in flight. Returns the seconds that its drafts saved, or waiting for where to put them; less than 0:
        lost."""
        self._steps += 1
        self._lost = max(-CREDIT, self._lost - SHARE)
        plain = self._plain.get(rows)
        if not drafts and self._overlaps and not ahead and plain is not None:
            return self._change(plain, rows, tokens, seconds)  # waited for, and then there were none
        if not drafts:
            self._overlaps |= ahead
            if plain is None:
                self._plain[rows] = _Plain(seconds)
            else:
                # steps grow with their contexts: after a pause the new one counts for more
                plain.seconds = _mean(plain.seconds, seconds, 0.5 if plain.age else WEIGHT)
                plain.age = 0
            return 0.0
        if plain is None:
            return 0.0
        plain.age += 1
        saved = self._change(plain, rows, tokens, seconds)
        cost = max(0.0, seconds / plain.seconds - 1)
        sizes = self._extra.setdefault(rows.bit_length(), {})
        if (known := sizes.get(_size(drafts))) is not None:
            cost = _mean(1 + known.cost * drafts / known.drafts, 1 + cost, WEIGHT) - 1
        sizes[_size(drafts)] = _Extra(drafts, cost, self._steps)
        return saved

    def _change(self, plain: _Plain, rows: int, tokens: int, seconds: float) -> float:
        """Beside steps without drafts that are planned as such."""
        self._lost = max(-CREDIT, self._lost + min(seconds / plain.seconds, MOST_LOST) - tokens / rows)
        return tokens / rows * plain.seconds - seconds

    def _cost(self, rows: int, drafts: int) -> float:
        """What so many drafts are expected to add to a step of so many rows, as a share of it. Between what was
        measured, straight lines. Beyond it, the root of the number, for drafts share experts: too little rather than
        too much, so that it is tried once."""
        known = self._extra.get(rows.bit_length(), {})
        if (extra := known.get(_size(drafts))) is not None:
            return self._believed(extra) * drafts / extra.drafts
        below = max((e for e in known.values() if e.drafts < drafts), key=lambda e: e.drafts, default=None)
        above = min((e for e in known.values() if e.drafts > drafts), key=lambda e: e.drafts, default=None)
        if below is None:
            return FIRST_COST * drafts / rows if above is None else self._believed(above) * drafts / above.drafts
        low = self._believed(below)
        if above is None:
            return low * math.sqrt(drafts / below.drafts)
        share = (drafts - below.drafts) / (above.drafts - below.drafts)
        return low + share * max(0.0, self._believed(above) - low)

    def _believed(self, extra: _Extra) -> float:
        return extra.cost * FORGET ** (self._steps - extra.step)


def _size(drafts: int) -> int:
    """Two sizes to a doubling."""
    bits = drafts.bit_length()
    return 2 * bits + (drafts >> bits - 2 & 1 if bits > 1 else 0)


def _within(offers: Sequence[Offer], level: float, most: float) -> list[int]:
    """Of each offer the drafts that are right with at least this chance, cut alike if they are more than `most`."""
    log = math.log(level)
    counts = [min(offer.drafts, int(log / math.log(offer.chance))) for offer in offers]
    if (drafts := sum(counts)) > most:
        counts = [int(count * most / drafts) for count in counts]
    return counts


def _expected(chance: float, count: int) -> float:
    """How many of `count` drafts will be right: p + p^2 + ..."""
    return chance * (1 - chance**count) / (1 - chance)


def _mean(known: float, new: float, weight: float) -> float:
    new = min(max(new, known / SURPRISE), known * SURPRISE)
    return known + weight * (new - known)
