"""Calls that may take long, each kind on a thread of its own; what comes of them is taken on the engine's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Event
from typing import TypeVar

_T = TypeVar("_T")


class Work:
    """`kinds` are the threads' names."""

    def __init__(self, *kinds: str) -> None:
        self._threads = {kind: ThreadPoolExecutor(1, thread_name_prefix=kind) for kind in kinds}
        self._reports: deque[Callable[[], None]] = deque()  # appended to by the threads
        self._reported = Event()
        self._num_running = 0

    @property
    def busy(self) -> bool:
        """Whether there is something that `take` will take."""
        return self._num_running > 0

    def start(self, kind: str, call: Callable[[], _T], then: Callable[[Future[_T]], None]) -> None:
        """Call after earlier ones of its kind; `take` gives the outcome to `then`."""
        self._num_running += 1
        future = self._threads[kind].submit(call)
        future.add_done_callback(lambda ended: self._report(partial(self._end, then, ended)))

    def take(self) -> None:
        """What was reported since the last call. Never waits, and costs nothing if nothing was."""
        while self._reports:
            self._reports.popleft()()

    def wait(self) -> None:
        """Until there is something to take, if anything runs."""
        while self.busy and not self._reports:
            self._reported.clear()
            if not self._reports:
                self._reported.wait(1.0)

    def close(self) -> None:
        """Wait for the calls that have begun; others are not made. No thread is left."""
        for threads in self._threads.values():
            threads.shutdown(wait=True, cancel_futures=True)

    def _report(self, what: Callable[[], None]) -> None:
        """On the thread that made the call: `take` calls `what`."""
        self._reports.append(what)
        self._reported.set()

    def _end(self, then: Callable[[Future[_T]], None], ended: Future[_T]) -> None:
        self._num_running -= 1
        then(ended)
