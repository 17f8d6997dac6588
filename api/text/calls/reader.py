"""What reads the calls between a format's markers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from api.text.deltas import Delta


class CallReader(ABC):
    """Of one stretch of calls. `first`: how many calls the answer has before it; `limit`: after so many it reads no
    more. `failed`: characters `consumed` to `read` are text."""

    def __init__(self, first: int, new_id: Callable[[], str], limit: int | None = None) -> None:
        self._first = first
        self._limit = limit
        self.new_id = new_id
        self.count = 0  # whole calls
        self.consumed = 0  # characters up to the end of the last one, where something else may follow
        self.read = 0  # characters
        self.failed = False

    @property
    def full(self) -> bool:
        return self.count == self._limit

    def _index(self) -> int:
        return self._first + self.count

    @property
    def in_string(self) -> bool:
        """Whether a closing marker that comes now is a part of an argument."""
        return False

    @abstractmethod
    def push(self, text: str) -> list[Delta]:
        """Text that is certain not to be the closing marker."""

    @abstractmethod
    def finish(self) -> list[Delta]:
        """The closing marker came, or the text ended."""


class SteppedReader(CallReader):
    """One that takes what is certain off a buffer, step by step."""

    def __init__(self, first: int, new_id: Callable[[], str], limit: int | None = None) -> None:
        super().__init__(first, new_id, limit)
        self._buffer = ""
        self._searched = 0  # of the buffer, for what ends a value

    def push(self, text: str) -> list[Delta]:
        self._buffer += text
        self.read += len(text)
        deltas: list[Delta] = []
        while not (self.failed or self.full) and self._step(deltas):
            pass
        if self.failed:
            self.read -= len(self._buffer)
        return deltas

    @abstractmethod
    def _step(self, deltas: list[Delta]) -> bool:
        """Whether something was read."""
