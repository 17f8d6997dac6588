"""A run of Tinker's API, and the order of its requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from api.dialects.tinker.futures import Future
from api.dialects.tinker.saved import RunRecord
from api.errors import ApiError

_EARLY = 512  # numbers past the next one that an order may have
_UNFINISHED = 64  # orders of a run that the engine has and that have not ended


@dataclass
class Early:
    """An order that waits for those before it: the `key` of its `future`, what starts it, and the tokens of its
    batch."""

    key: str
    future: Future
    start: Callable[[], None]
    tokens: int
    timer: asyncio.TimerHandle | None = None


class Run:
    """`snapshots`: names of those that are served without a file, oldest first. A run that has been idle goes to disk
    when others want room, and comes back with its next order. `patience_s`: how long an order waits for one that has
    not come."""

    def __init__(self, record: RunRecord, weight: float, patience_s: float) -> None:
        self.record, self.weight, self._patience_s = record, weight, patience_s
        self.last_s = time.time()
        self.lock = asyncio.Lock()  # held while it goes to disk and comes back
        self.on_disk = False
        self.started = self.tokens = 0  # orders that have started and have not ended, and the tokens of their batches
        self.learning = False  # there are gradients that no step has used
        self.snapshots: list[str] = []
        self.ended: ApiError | None = None  # what its orders are answered since it was closed or lost
        self.next = 1  # the seq_id of the order that starts next
        self._early: dict[int, Early] = {}
        self._numbered: dict[int, str] = {}  # futures by seq_id

    @property
    def session(self) -> str:
        return self.record.id.partition(":")[0]

    @property
    def pending(self) -> int:
        """Orders that have not ended."""
        return self.started + len(self._early)

    @property
    def early_tokens(self) -> int:
        return sum(each.tokens for each in self._early.values())

    def numbered(self, seq_id: int) -> str | None:
        """The future of an order that has come before."""
        return self._numbered.get(seq_id)

    def take(self, seq_id: int, order: Early) -> None:
        """Starts when all orders before have started; else its future fails when the run ends. Raises ApiError."""
        if self.ended is not None:
            raise self.ended
        if not self.next <= seq_id <= self.next + _EARLY:
            raise ApiError(400, f"seq_id {seq_id}: {self.next} is the next one", param="seq_id")
        if self.started >= _UNFINISHED:
            message = f"{self.started} requests of this run have not ended: wait for some"
            raise ApiError(429, message, code="too_many", retry_after_s=1.0)
        self.last_s = time.time()
        self._numbered[seq_id] = order.key
        self._numbered.pop(seq_id - 4 * _EARLY, None)
        self._early[seq_id] = order
        while (now := self._early.pop(self.next, None)) is not None:
            if now.timer is not None:
                now.timer.cancel()
            self.next += 1
            self.started, self.tokens = self.started + 1, self.tokens + now.tokens
            now.start()
        if seq_id in self._early:
            order.timer = asyncio.get_running_loop().call_later(self._patience_s, self._give_up, seq_id)

    def _give_up(self, seq_id: int) -> None:
        """It may be asked again."""
        order = self._early.pop(seq_id)
        del self._numbered[seq_id]
        message = f"seq_id {seq_id}: the request with seq_id {self.next} has not come in {self._patience_s:g} s"
        order.future.fail(ApiError(408, message, param="seq_id", code="predecessor_missing"))

    def end(self, error: ApiError) -> None:
        """No order starts any more; those that have not started fail."""
        self.ended = error
        for order in self._early.values():
            if order.timer is not None:
                order.timer.cancel()
            order.future.fail(error)
        self._early.clear()
