"""Carries out what the scheduler orders of blocks on disk, on threads: one writes, a few read."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import cycle
from typing import NamedTuple

from engine.device import Arrival
from engine.kv_disk.files import BlockFiles
from engine.kv_disk.units import Units
from engine.work import Work
from scheduler.memory.disk import DiskBlocks
from scheduler.plan import Drop, Fetch, Save

_WRITER = "kv-write"
_MOST_READERS = 4
_POLL_S = 0.001
_CLOSE_S = 5.0  # for what is not written yet; the api waits for 10

log = logging.getLogger(__name__)


class _Part(NamedTuple):
    """One share's reads are all of blocks, or all of states."""

    key: bytes
    place: int
    state: bool


@dataclass
class _Reading:
    """A fetch, shared among the readers."""

    shares_left: int
    bad: set[bytes] = field(default_factory=set)


def disk_threads() -> int:
    """How many write and read."""
    return 1 + min(_MOST_READERS, os.cpu_count() or 1)


class KvDisk:
    """`units` are the blocks of the KV cache, `states` slots of states, None where layers keep none. `identity` tells
    the model and how its KV is computed from all others; `launched` gives the point up to which steps were launched.
    All methods belong to the engine's thread."""

    def __init__(
        self,
        files: BlockFiles,
        blocks: DiskBlocks,
        identity: bytes,
        launched: Callable[[], Arrival],
        units: Units,
        states: Units | None = None,
    ) -> None:
        self._files, self._blocks, self._identity, self._launched = files, blocks, identity, launched
        self._units = {False: units} | ({} if states is None else {True: states})  # by whether they are states
        self._readers = [f"kv-read-{i}" for i in range(disk_threads() - 1)]
        self._work = Work(_WRITER, *self._readers)
        self._reading: dict[Fetch, _Reading] = {}
        self._read_bytes = self._written_bytes = 0
        self._failed = False

    def digest(self, adapter: bytes | None) -> bytes:
        """`Request.kv_digest` of requests with an adapter of this digest, None: of the base. b"" if the adapter has
        none."""
        return b"" if adapter == b"" else blake2b(adapter or b"", key=self._identity, digest_size=32).digest()

    def take(self) -> None:
        """Between steps: tell the scheduler what has ended. Never waits."""
        self._work.take()

    def start(self) -> None:
        """What the scheduler has decided since. Never waits."""
        orders = self._blocks.orders()
        if not orders:
            return
        launched = self._launched()  # steps up to here may still use what these are to read and write
        for order in orders:
            if isinstance(order, Save):
                self._work.start(_WRITER, partial(self._write, order, launched), partial(self._saved, order))
            elif isinstance(order, Drop):
                self._work.start(_WRITER, partial(self._files.delete, order.key), lambda deleted: deleted.result())
            else:
                self._fetch(order, launched)

    @property
    def busy(self) -> bool:
        """Whether `take` or `start` has something to do now or soon."""
        return self._work.busy or self._blocks.busy

    def stats(self) -> dict[str, float | int]:
        return {
            "disk_read_bytes": self._read_bytes,
            "disk_written_bytes": self._written_bytes,
        }

    def close(self) -> None:
        """Write what is complete, for a few seconds; no thread is left."""
        give_up = time.monotonic() + _CLOSE_S
        self.start()
        while self.busy and time.monotonic() < give_up:
            time.sleep(_POLL_S)
            self.take()
            self.start()
        if self.busy:
            log.warning("KV blocks on disk: not all of them were written within %.0f s", _CLOSE_S)
        self._work.close()
        self._files.keep_order(self._blocks.keys(), time.time_ns())
        self._files.close()

    def _write(self, save: Save, launched: Arrival) -> None:
        """On the writer's thread."""
        launched.wait()
        units = self._units[save.state]
        with units.buffer() as content:
            units.get(save.block, content)
            self._files.write(save.key, content)

    def _saved(self, save: Save, ended: Future[None]) -> None:
        error = ended.exception()
        if error is not None and not isinstance(error, OSError):
            raise error
        if error is not None and not self._failed:
            self._failed = True
            log.warning("KV blocks are written to %s no more: %s", self._files.folder, error)
        self._written_bytes += self._units[save.state].num_bytes if error is None else 0
        self._blocks.saved(save.key, error is None)

    def _fetch(self, fetch: Fetch, launched: Arrival) -> None:
        # neighbours to one reader: two that touch a huge page for the first time would both fill it with zeros
        blocks = [_Part(key, block, False) for key, block in fetch.parts]
        readers = self._readers if fetch.state is None else self._readers[1:] or self._readers
        share = max(1, -(-len(blocks) // len(readers)))
        shares = [blocks[i : i + share] for i in range(0, len(blocks), share)]
        if fetch.state is not None:  # it is as large as many blocks
            shares.append([_Part(*fetch.state, True)])
        self._reading[fetch] = _Reading(len(shares))
        for reader, parts in zip(cycle(self._readers), shares, strict=False):
            self._work.start(reader, partial(self._read, parts, launched), partial(self._was_read, fetch))

    def _read(self, parts: Sequence[_Part], launched: Arrival) -> set[bytes]:
        """On a reader's thread: the keys that could not be read."""
        launched.wait()
        units, bad = self._units[parts[0].state], set()
        with units.buffer() as content:
            for part in parts:
                if self._files.read(part.key, content):
                    units.put(part.place, content)
                else:
                    bad.add(part.key)
        return bad

    def _was_read(self, fetch: Fetch, ended: Future[set[bytes]]) -> None:
        reading = self._reading[fetch]
        reading.bad |= ended.result()
        reading.shares_left -= 1
        if not reading.shares_left:
            del self._reading[fetch]
            keys = [key for key, _ in fetch.parts]
            self._read_bytes += self._units[False].num_bytes * sum(key not in reading.bad for key in keys)
            if fetch.state is not None and fetch.state[0] not in reading.bad:
                self._read_bytes += self._units[True].num_bytes
            self._blocks.fetched(fetch, reading.bad)
