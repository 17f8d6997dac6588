"""Whether a decode step is faster as two half-batches: one on the GPU while the CPU pool works on the other's experts.

    whole     GPU + pool(experts of all rows)                                                a layer
    halves    max(pool(A), GPU(B)) + max(pool(B), GPU(A))                                    a layer

An expert that rows of both halves chose is read twice, so halves pay only where the GPU's part is worth hiding: long
contexts over few rows or small experts. Both sides are measured: the GPU by steps without experts and the pool by
distinct experts at start-up, then every step's time as it ends. Torch-free; seconds come from the caller.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

_Point = tuple[float, float]

START_GAIN = 0.03  # of the whole step's time: halves are taken up from here
STAY_GAIN = 0.0  # and kept down to here
HOPE_GAIN = -0.02  # sizes whose best case is predicted below this are not even prepared
TRY_GAIN = -0.1  # from here halves are looked at now and then: no prediction is much better than that
PROBE_EVERY = 256  # steps one way, after which a few run the other way
PROBE_STEPS = 6
_WEIGHT = 0.25  # of a new observation, at least: the first ones weigh more
_MOST_SURPRISE = 2.0  # a step counts as at most so many times slower or faster than predicted
_FORGET = 0.002  # of what was seen of halves, for each whole step since


@dataclass(frozen=True)
class Work:
    """A decode step: its rows, the KV positions that they read together, whether some row has an adapter."""

    rows: int
    read: int
    lora: bool


class Chooser(Protocol):
    learns: bool  # whether `observe` wants to hear of steps

    def halves(self, work: Work) -> bool: ...

    def observe(self, work: Work, halves: bool, seconds: float) -> None: ...


class Always:
    """Every step that can run as two half-batches does."""

    learns = False

    def halves(self, work: Work) -> bool:
        return work.rows > 1

    def observe(self, work: Work, halves: bool, seconds: float) -> None:
        return None


class Line:
    """Straight lines between measured points, through the origin and never falling; the last one goes on."""

    def __init__(self, points: Mapping[float, float]) -> None:
        """`points`: y by x > 0; at least one."""
        self._points = [(0.0, 0.0)]
        for x, y in sorted(points.items()):
            self._points.append((x, max(y, self._points[-1][1])))

    def at(self, x: float) -> float:
        (x0, y0), (x1, y1) = self._piece(lambda point: point[0] >= x)
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

    def where(self, y: float) -> float:
        """The x of a y."""
        (x0, y0), (x1, y1) = self._piece(lambda point: point[1] >= y)
        return x1 if y1 <= y0 else x0 + (x1 - x0) * (y - y0) / (y1 - y0)

    def _piece(self, reaches: Callable[[_Point], bool]) -> tuple[_Point, _Point]:
        """The first piece whose end `reaches`, or the last one."""
        pairs = list(itertools.pairwise(self._points))
        return next((pair for pair in pairs if reaches(pair[1])), pairs[-1])


@dataclass(frozen=True)
class Costs:
    """What start-up measured of one layer. `fixed_s`: the GPU's part over empty contexts, by padded rows, without and
    with adapters; `read_s`: more for each KV position read; `pool_s`: the CPU pool's, by distinct experts."""

    layers: int
    experts: int
    top_k: int
    fixed_s: dict[bool, Line]
    read_s: float
    pool_s: Line

    def gpu_s(self, rows: int, read: float, lora: bool) -> float:
        return self.fixed_s[lora].at(rows) + self.read_s * read

    def whole_s(self, work: Work, spread: float, pace: float) -> float:
        pool = pace * self.pool_s.at(touched(spread, work.rows, self.top_k))
        return self.layers * (self.gpu_s(work.rows, work.read, work.lora) + pool)

    def halves_s(self, work: Work, spread: float, pace: float) -> float:
        gpu, pool = [], []
        for rows in (-(-work.rows // 2), work.rows // 2):
            gpu.append(self.gpu_s(rows, work.read * rows / work.rows, work.lora))
            pool.append(pace * self.pool_s.at(touched(spread, rows, self.top_k)))
        return gpu[0] + self.layers * (max(pool[0], gpu[1]) + max(pool[1], gpu[0]))

    def can_pay(self, rows: int, most_read: int) -> bool:
        """Whether a step of so many rows may be worth halving, if its rows spread evenly over the experts."""
        works = [Work(rows, read, lora) for lora in self.fixed_s for read in (rows, most_read)]
        even = float(self.experts)
        return any(self.halves_s(w, even, 1.0) < (1 - HOPE_GAIN) * self.whole_s(w, even, 1.0) for w in works)


def touched(spread: float, rows: int, top_k: int) -> float:
    """Distinct experts of `rows` rows, if each draws `top_k` of `spread` equally likely ones."""
    return spread * (1 - (1 - top_k / spread) ** rows) if spread > top_k else float(top_k)


@dataclass
class _Routing:
    """What whole steps have said: over how many experts the rows spread, and how much slower the pool is than that
    (adapters, other processes). `halves`: how much longer steps in halves took than predicted."""

    spread: float
    pace: float = 1.0
    halves: float = 1.0
    halving: bool = False
    first: int = PROBE_STEPS  # whole steps to go before anything else is tried
    since: int = PROBE_EVERY  # steps since the last probe
    probe: int = 0  # steps to go that are run the other way
    seen: int = 0  # whole steps

    @property
    def weight(self) -> float:
        return max(_WEIGHT, 1 / max(self.seen, 1))


class Measured:
    """The faster of the two, by `costs` and by what the steps themselves take; with and without adapters apart."""

    learns = True

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._routing = {lora: _Routing(float(costs.experts)) for lora in costs.fixed_s}

    def predict(self, work: Work) -> tuple[float, float]:
        """Seconds of a step as a whole and in halves."""
        r = self._routing[work.lora]
        whole = self.costs.whole_s(work, r.spread, r.pace)
        return whole, r.halves * self.costs.halves_s(work, r.spread, r.pace)

    def halves(self, work: Work) -> bool:
        if work.rows < 2:
            return False
        r = self._routing[work.lora]
        if r.first > 0:
            r.first -= 1
            return False
        whole, halves = self.predict(work)
        gain = 1 - halves / whole
        halving = gain > (STAY_GAIN if r.halving else START_GAIN)
        if halving != r.halving:
            r.halving, r.since, r.probe = halving, 0, 0
        r.since += 1
        if r.since > PROBE_EVERY and (halving or gain > TRY_GAIN):
            r.since, r.probe = 0, PROBE_STEPS
        if r.probe > 0:
            r.probe -= 1
            return not halving
        return halving

    def observe(self, work: Work, halves: bool, seconds: float) -> None:
        r = self._routing[work.lora]
        whole_s, halves_s = self.predict(work)
        expected = halves_s if halves else whole_s
        if not 0 < seconds < float("inf") or expected <= 0:
            return  # a clock that stood still or jumped tells nothing
        seconds = min(max(seconds, expected / _MOST_SURPRISE), expected * _MOST_SURPRISE)
        if halves:
            r.halves += _WEIGHT * (seconds / expected - 1) * r.halves
            return
        r.halves += _FORGET * (1 - r.halves)  # what was slow once may be tried again
        r.seen += 1
        c = self.costs
        pool = max(seconds / c.layers - c.gpu_s(work.rows, work.read, work.lora), 0.0)
        if work.rows == 1:  # every routing touches top_k experts
            r.pace += r.weight * (max(pool / c.pool_s.at(c.top_k), 1.0) - r.pace)
            return
        spread = self._spread(c.pool_s.where(pool), work.rows)
        r.spread += r.weight * (spread - r.spread)
        even = c.pool_s.at(touched(r.spread, work.rows, c.top_k))
        r.pace += r.weight * (max(pool / even, 1.0) - r.pace)

    def _spread(self, distinct: float, rows: int) -> float:
        """The inverse of `touched`, within what the model has."""
        low, high = float(self.costs.top_k), float(self.costs.experts)
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if touched(middle, rows, self.costs.top_k) < distinct else (low, middle)
        return high
