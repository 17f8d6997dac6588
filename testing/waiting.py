"""How tests wait: for an event, as long as any machine may need. Only a test that has failed ever waits so long."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 120.0


def eventually(
    check: Callable[[], object], what: str = "", patience_s: float = PATIENCE_S, every_s: float = 0.01
) -> None:
    """Return once `check` is true, looked at `every_s`."""
    deadline = time.monotonic() + patience_s
    while not check():
        assert time.monotonic() < deadline, what or "it did not happen"
        time.sleep(every_s)


def comes_to_rest(share: float = 0.01, window_s: float = 0.3) -> None:
    """Return once this process has used less than `share` of a CPU for `window_s`; what spins never does."""

    def idle() -> bool:
        used, began = time.process_time(), time.monotonic()
        time.sleep(window_s)
        return time.process_time() - used < share * (time.monotonic() - began)

    eventually(idle, "the process does not come to rest")
