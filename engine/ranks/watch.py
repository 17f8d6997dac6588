"""Ends a group in which a rank does not come, and says which. Torch-free.

Exchanges wait without a look at the clock. A thread of each rank looks at the places of all (`engine.ranks.progress`)
once a second. Nobody is waited for longer than a limit:

- a rank whose own thread does not beat: its process is stopped, or hangs with the interpreter's lock;
- ranks none of which goes on while one of them waits for the others.

The lowest rank that beats ends the group, usually rank 0.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.ranks.progress import Place, Progress, Stage, Wait

BEAT_S = 1.0


@dataclass(frozen=True)
class Limits:
    """Seconds. While a group starts, kernels are compiled and weights come from slow disks. `serving_s` is less than
    the server's --engine-hang-s (120), which ends the engine without a word on its ranks."""

    serving_s: float = 100.0
    start_s: float = 600.0


LIMITS = Limits()


class Lateness:
    """For how long ranks have not beaten, and the group has not gone on, as one rank has seen it. `look` is called
    about once a second."""

    def __init__(self, progress: Progress, limits: Limits) -> None:
        self._progress, self._limits = progress, limits
        self._places = progress.places()
        self._silent_s = [0.0] * progress.size
        self._standing_s = 0.0

    def look(self, elapsed_s: float) -> str:
        """`elapsed_s` since the last look. Why the group is to be ended by this rank; "": it is not."""
        before, places = self._places, self._progress.places()
        self._places = places
        for rank, (old, new) in enumerate(zip(before, places, strict=True)):
            self._silent_s[rank] = 0.0 if old.beats != new.beats else self._silent_s[rank] + elapsed_s
        stands = [p.without_beats for p in before] == [p.without_beats for p in places] and any(map(_waits, places))
        self._standing_s = self._standing_s + elapsed_s if stands else 0.0
        starts = any(place.stage is not Stage.SERVING for place in places)
        limit_s = self._limits.start_s if starts else self._limits.serving_s
        silent = [rank for rank, seconds in enumerate(self._silent_s) if seconds >= limit_s]
        own, first = self._progress.rank, min(set(range(len(places))) - set(silent), default=None)
        if own != first or not (silent or self._standing_s >= limit_s):
            return ""
        return _message(silent, places, limit_s)


class Watch:
    """`end(why)` is called from a thread of its own, once."""

    def __init__(self, progress: Progress, limits: Limits, end: Callable[[str], object]) -> None:
        self._progress, self._lateness, self._end = progress, Lateness(progress, limits), end
        self._stop = threading.Event()
        progress.beat()
        threading.Thread(target=self._run, name="ranks", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(BEAT_S):
            self._progress.beat()
            now = time.monotonic()
            elapsed_s, last = min(now - last, 2 * BEAT_S), now  # more: all of the group was stopped, perhaps
            if (why := self._lateness.look(elapsed_s)) and not self._stop.is_set():
                self._end(why)
                return


def _waits(place: Place) -> bool:
    """For another rank. No rank is idle before all serve: what each does is part of the start."""
    return place.wait in (Wait.EXCHANGE, Wait.RESULTS, Wait.OTHERS, Wait.SENT) or place.stage is Stage.PREPARING


def missing(places: list[Place]) -> list[int]:
    """The ranks that the others wait for, if none of them goes on: those furthest behind of all that compute, or have
    not taken a step. Empty: each waits for another."""
    behind = {
        rank: (place.stage, place.step, place.exchange)
        for rank, place in enumerate(places)
        if place.wait is Wait.NOTHING or (place.wait is Wait.STEP and place.step < places[0].step)
    }
    return [rank for rank, at in behind.items() if at == min(behind.values())]


def _message(silent: list[int], places: list[Place], limit_s: float) -> str:
    late = silent or missing(places)
    who = f"rank{'s' if len(late) > 1 else ''} {' and '.join(map(str, late))} of {len(places)}"
    have = "have" if len(late) > 1 else "has"
    if silent:
        what = f"{who} {have} given no sign of life for {limit_s:g} s"
    elif late:
        what = f"the other ranks have waited {limit_s:g} s for {who}, which {have} not come"
    else:
        what = f"all {len(places)} ranks have waited {limit_s:g} s for an exchange that has not ended"
    return f"{what} ({'; '.join(f'rank {rank}: {_described(place)}' for rank, place in enumerate(places))})"


_STAGES = {
    Stage.STARTING: "its process starts",
    Stage.LOADING: "loading",
    Stage.CONNECTING: "connecting",
    Stage.PREPARING: "preparing decode steps",
    Stage.SERVING: "serving",
}
_WAITS = {
    Wait.NOTHING: "computing",
    Wait.STEP: "waits for the next step",
    Wait.EXCHANGE: "waits in it",
    Wait.RESULTS: "waits for its GPU",
    Wait.OTHERS: "waits for the other ranks",
    Wait.SENT: "waits until others take a step",
}


def _described(place: Place) -> str:
    if place.stage is Stage.STARTING:
        return _STAGES[place.stage]
    if place.stage is Stage.LOADING:
        return f"loading, {place.parts} parts are loaded, {_WAITS[place.wait]}"
    return f"{_STAGES[place.stage]}, step {place.step}, exchange {place.exchange}, {_WAITS[place.wait]}"
