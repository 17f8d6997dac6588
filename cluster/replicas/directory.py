"""What replicas share: the adapters that were loaded at run time, and what each replica last said of itself.

One of it is a deployment beside the replicas, on some node. It knows nothing of Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cluster.call import Call

_FORGET_S = 30.0  # a replica that says nothing for so long has ended


@dataclass(frozen=True)
class Change:
    """The last one of an adapter, by a number that only grows: the call that loaded or unloaded it."""

    number: int
    call: Call


@dataclass(frozen=True)
class Catalogue:
    """The last change of each adapter that was changed at run time."""

    number: int = 0
    changes: Mapping[str, Change] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """Of a replica: the status that its server's /health tells, and its /metrics ("" where they are off)."""

    status: str
    metrics: str


class Directory:
    """One actor of an application: the adapters that replicas are to have, and what each replica last reported."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._catalogue = Catalogue()
        self._reports: dict[str, tuple[float, Report]] = {}

    async def number(self) -> int:
        """Of the last change."""
        return self._catalogue.number

    async def catalogue(self, known: Catalogue) -> Catalogue:
        """`known`: the caller's. It is taken over if it has more: this process has restarted."""
        if known.number > self._catalogue.number:
            self._catalogue = known
        return self._catalogue

    async def record(self, adapter: str, call: Call) -> Catalogue:
        """A change that a replica has made."""
        number = self._catalogue.number + 1
        self._catalogue = Catalogue(number, {**self._catalogue.changes, adapter: Change(number, call)})
        return self._catalogue

    async def report(self, replica: str, report: Report) -> int:
        """How many replicas there are."""
        self._reports[replica] = self._clock(), report
        return len(await self.reports())

    async def leave(self, replica: str) -> None:
        """It ends."""
        self._reports.pop(replica, None)

    async def reports(self) -> dict[str, Report]:
        """Of each replica, the last one."""
        now = self._clock()
        self._reports = {name: said for name, said in self._reports.items() if now - said[0] < _FORGET_S}
        return {name: report for name, (_, report) in sorted(self._reports.items())}
