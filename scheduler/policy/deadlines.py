"""Which requests are late, without looking at all of them."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from scheduler.request import Request

_SPARE = 64


class Deadlines:
    """Those of the requests that have one. Ended requests are forgotten in time: the entries are at most twice as many
    as the live ones, and some."""

    def __init__(self, live: Mapping[str, Request]) -> None:
        self._live = live  # by request id
        self._heap: list[tuple[float, int, str]] = []  # deadline, arrival, request id

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """One that has arrived."""
        if request.deadline is None:
            return
        heappush(self._heap, (request.deadline, request.arrival, request.request_id))
        if len(self._heap) > 2 * len(self._live) + _SPARE:
            self._heap = [entry for entry in self._heap if entry[2] in self._live]
            heapify(self._heap)

    def take_late(self, now: float) -> list[Request]:
        """Live requests whose deadline has passed, the earliest first; each is returned once."""
        late = []
        while self._heap and self._heap[0][0] <= now:
            _, arrival, request_id = heappop(self._heap)
            request = self._live.get(request_id)
            if request is not None and request.arrival == arrival:  # not a later one of the same id
                late.append(request)
        return late
