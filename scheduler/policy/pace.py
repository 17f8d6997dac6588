"""How soon a place in the queue becomes free."""

from __future__ import annotations


class Pace:
    """Mean time between ends of requests, as an answer to "when shall I come again?"."""

    def __init__(self) -> None:
        self._interval_s: float | None = None
        self._last: float | None = None

    def ended(self, count: int, now: float) -> None:
        if count and self._last is not None and now > self._last:
            interval = (now - self._last) / count
            self._interval_s = interval if self._interval_s is None else 0.8 * self._interval_s + 0.2 * interval
        if count:
            self._last = now

    def retry_after_s(self, num_waiting: int) -> float:
        """Until about half of the queue has gone; between 1 and 60 seconds."""
        return min(60.0, max(1.0, (self._interval_s or 0.0) * num_waiting / 2))
