"""How long a dead engine stays dead: what it served before it died decides."""

from __future__ import annotations

_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 60.0
_FORGIVING_S = 30.0  # of service take one death off the count; so does each answered request


class Backoff:
    """`deaths`: those in a row, of which service has forgiven none. The first waits 0.5 s for its restart, each further
    one twice as long, up to 60 s. An engine that never served forgives nothing: delays grow where starts fail."""

    def __init__(self) -> None:
        self.deaths = 0

    def died(self, served_s: float, answered: int) -> float:
        """An engine ended that had served for `served_s` seconds (0: it never did) and answered so many requests.
        Returns the seconds until the next is to start."""
        self.deaths = max(0, self.deaths - answered - int(served_s / _FORGIVING_S)) + 1
        return float(min(_MAX_DELAY_S, _FIRST_DELAY_S * 2 ** min(self.deaths - 1, 10)))
