"""In which order snapshots of states are evicted.

The share of a kind of snapshots is that of them from which others have begun so far. The least recently used ones of
all kinds are compared, and the one with the lowest share^2 / age is evicted, so that every snapshot
ages out.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

_MOST_COUNTED = 256  # snapshots of a kind; then older ones count half


class Kind(enum.Enum):
    TURN = "turn"  # of one conversation: behind a prompt, or in an answer
    PART = "part"  # behind a document or paragraph of a prompt, of which nobody has begun yet
    SHARED = "shared"  # of several conversations: they have begun or parted there, or a system message ends


class _Count:
    """Of a kind. It begins as if each were read, so that a kind is given a chance."""

    def __init__(self) -> None:
        self.saved = self.read = 1.0

    @property
    def share(self) -> float:
        return min(self.read / self.saved, 1.0)

    def halve(self) -> None:
        if self.saved > _MOST_COUNTED:
            self.saved, self.read = self.saved / 2, self.read / 2


class Order:
    """Keys of snapshots, each of a kind and with the time when it was last used."""

    def __init__(self) -> None:
        self._kinds: dict[bytes, Kind] = {}
        self._used: dict[Kind, OrderedDict[bytes, int]] = {kind: OrderedDict() for kind in Kind}
        self._counts = {Kind.TURN: _Count(), Kind.PART: _Count()}

    def kind(self, key: bytes) -> Kind:
        return self._kinds[key]

    def used(self, key: bytes) -> int:
        """When it was; below 0: it is to be evicted first."""
        return self._used[self._kinds[key]][key]

    def add(self, key: bytes, kind: Kind, now: int, *, counts: bool) -> None:
        """`counts`: it is one of its kind that others may begin from; not so for each next one of an answer."""
        self._kinds[key] = kind
        self._used[kind][key] = now
        if counts and kind in self._counts:
            self._counts[kind].saved += 1
            self._counts[kind].halve()

    def remove(self, key: bytes) -> None:
        del self._used[self._kinds.pop(key)][key]

    def touch(self, key: bytes, now: int) -> None:
        queue = self._used[self._kinds[key]]
        queue[key] = now
        queue.move_to_end(key)

    def count_read(self, kind: Kind) -> None:
        self._counts[kind].read += 1

    def share(self, key: bytes) -> None:
        """Several conversations begin from it."""
        kind = self._kinds[key]
        if kind is Kind.PART:
            self.count_read(kind)
        self._used[Kind.SHARED][key] = self._used[kind].pop(key)
        self._kinds[key] = Kind.SHARED

    def evict_first(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            queue = self._used[self._kinds[key]]
            queue[key] = -1
            queue.move_to_end(key, last=False)

    def first(self, now: int, is_held: Callable[[bytes], bool]) -> bytes | None:
        """The one to be evicted, but for those that are held."""
        best, least = None, 0.0
        for kind, queue in self._used.items():
            key = next((each for each in queue if not is_held(each)), None)
            if key is None:
                continue
            share = self._counts[kind].share if kind in self._counts else 1.0
            score = share**2 / (now - queue[key] + 1) if queue[key] >= 0 else -1.0
            if best is None or score < least:
                best, least = key, score
        return best

    def problems(self, keys: Collection[bytes]) -> list[str]:
        """What contradicts that these are the keys."""
        queued = sorted(key for queue in self._used.values() for key in queue)
        if queued == sorted(self._kinds) == sorted(keys):
            return []
        return [f"{len(keys)} snapshots are findable, {len(queued)} can be evicted"]
