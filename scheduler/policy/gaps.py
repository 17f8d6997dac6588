"""When a step of background requests may begin, and how long it may take: a live request that comes meanwhile waits
until it ends."""

from __future__ import annotations

import math

SHARE = 0.05  # of what a live request takes
IDLE_SHARE = 0.01  # of the time since the last one
PAUSE_SHARE = 0.03  # after a live request nothing runs for so much of what one takes: another may follow at once
MOST_PAUSE_S = 0.1
WEIGHT = 1 / 8  # of the newest live request among those that say what one takes


class Gaps:
    """Seconds of the caller's clock. What live requests take is their geometric mean, so that a few long ones do not
    speak for many short ones."""

    def __init__(self) -> None:
        self._log_s: float | None = None
        self._last_s = -math.inf

    def live(self, now: float) -> None:
        """There is a live request."""
        self._last_s = max(self._last_s, now)

    def ended(self, seconds: float, now: float) -> None:
        """A live request took so long from its arrival on."""
        self.live(now)
        log_s = math.log(max(seconds, 1e-6))
        self._log_s = log_s if self._log_s is None else self._log_s + WEIGHT * (log_s - self._log_s)

    def paused(self, now: float) -> bool:
        """Whether the client of the last live request may be about to send another."""
        if self._log_s is None:
            return False
        return now - self._last_s < min(PAUSE_SHARE * math.exp(self._log_s), MOST_PAUSE_S)

    def allowed_s(self, now: float) -> float | None:
        """Of a background step; None: whatever it takes, for no live request has ended yet."""
        if self._log_s is None:
            return None
        return SHARE * math.exp(self._log_s) + IDLE_SHARE * max(0.0, now - self._last_s)

    def allows(self, seconds: float | None, now: float) -> bool:
        """A background step that takes so long (None: nobody knows), whose size is not to be chosen."""
        allowed_s = self.allowed_s(now)
        return not self.paused(now) and (allowed_s is None or (seconds is not None and seconds <= allowed_s))
