"""The folders that are to be read, one at a time, and the room that each of them gets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, Protocol

from engine.errors import AdapterError, EngineError, UserError
from engine.lora.adapter import AdapterWeights
from engine.lora.budget import AdapterSize
from engine.lora.reading.process import ReadRequest
from engine.lora.residency import HostMemory
from engine.lora.version import AdapterStatus, Version
from engine.work import Work

READ = "adapter-load"  # the kind of work, and its thread's name


class Reader(Protocol):
    """Reads one folder at a time. `make_room` gets the size before the memory is taken, and waits or raises. Raises
    UserError for a folder that cannot be served. `close` ends a read."""

    def read(self, request: ReadRequest, make_room: Callable[[AdapterSize], None]) -> AdapterWeights: ...

    def close(self) -> None: ...


class Read(NamedTuple):
    """For the call that loads the version, or again because the `slot` is to be filled."""

    version: Version
    slot: int | None


class _Room(NamedTuple):
    """Asked for by the reader's thread, which waits for `granted`."""

    size: AdapterSize
    granted: Future[None]


class Reads:
    """`request` makes the reader's order, `replaced` says what a version is to replace, `done` takes the outcome and
    `evicted` what had to go for it. All methods belong to the engine's thread."""

    def __init__(
        self,
        reader: Reader,
        work: Work,
        memory: HostMemory,
        request: Callable[[Version], ReadRequest],
        replaced: Callable[[Version], Version | None],
        done: Callable[[Read, Future[AdapterWeights]], None],
        evicted: Callable[[Version], None],
    ) -> None:
        self._reader, self._work, self._memory = reader, work, memory
        self._request, self._replaced, self._done, self._evicted = request, replaced, done, evicted
        self._queue: deque[Read] = deque()  # the first of them is being read
        self._room: _Room | None = None  # what the reader waits for
        self._closed = False
        self.num_again = 0

    def add(self, read: Read) -> None:
        self._queue.append(read)
        if len(self._queue) == 1:
            self._next()

    def loading(self) -> list[Version]:
        """Versions that a call loads, in order."""
        return [read.version for read in self._queue if read.slot is None]

    def again(self) -> list[Version]:
        """Versions that are read for a slot, in order."""
        return [read.version for read in self._queue if read.slot is not None]

    def grant_room(self) -> None:
        """To the one who waits for it, if there is some; else copies are being made, after which there is more."""
        if (room := self._room) is None:
            return
        version = self._queue[0].version
        old = self._replaced(version)
        try:
            if version.status is AdapterStatus.LOADING:
                self._memory.check(version, room.size, old)
            elif room.size != version.size:
                raise changed(version)
        except UserError as error:
            self._room = None
            room.granted.set_exception(error)
            return
        evicted = self._memory.make_room(version, room.size, old)
        if evicted is None:
            return
        for other in evicted:
            self._evicted(other)
        self._room, version.size = None, room.size
        room.granted.set_result(None)

    def close(self) -> None:
        """End a read that is in progress."""
        self._closed = True
        self._reader.close()
        if (room := self._room) is not None:
            self._room = None
            room.granted.set_exception(EngineError("the engine ends"))

    def _next(self) -> None:
        read = self._queue[0]
        call = partial(self._reader.read, self._request(read.version), self._make_room)
        self._work.start(READ, call, self._ended)

    def _ended(self, future: Future[AdapterWeights]) -> None:
        read = self._queue.popleft()
        self.num_again += read.slot is not None
        self._done(read, future)
        if self._queue and not self._closed:
            self._next()

    def _make_room(self, size: AdapterSize) -> None:
        """On the reader's thread: wait until so much is free for what it has read."""
        room = self._room = _Room(size, Future())
        if self._closed:  # set before `close` looks for one who waits
            raise EngineError("the engine ends")
        self._work.report(self.grant_room)
        room.granted.result()


def changed(version: Version) -> AdapterError:
    return AdapterError(
        f"adapter {version.name!r} is no longer in memory, and {version.path} holds something else by now: load it "
        "again, with replace"
    )
