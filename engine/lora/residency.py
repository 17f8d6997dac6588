"""Which adapter versions are in host memory.

    disk --read--> host --fill--> slot        host --evicted, least recently used--> disk

A slot's copy lives on without the host's. Not evicted are pinned adapters and those that are being copied into a
slot. Of the others, adapters that requests wait for go later than those that nobody wants; retiring versions go last,
because their folders may hold another version by now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.errors import EngineError
from engine.lora.budget import AdapterBudget, AdapterSize
from engine.lora.version import AdapterStatus, Version
from scheduler.request import AdapterKey


class HostMemory:
    """`versions` are all that there are; `wanted` says whether requests wait for a version."""

    def __init__(
        self, budget: AdapterBudget, versions: dict[AdapterKey, Version], wanted: Callable[[AdapterKey], bool]
    ) -> None:
        self.budget = budget
        self.num_evictions = 0
        self._versions = versions
        self._wanted = wanted
        self._used: dict[AdapterKey, None] = {}  # those in host memory, the least recently used first

    def __len__(self) -> int:
        return len(self._used)

    def touch(self, version: Version) -> None:
        """The version, which is in host memory, is used now."""
        self._used.pop(version.key, None)
        self._used[version.key] = None

    def drop(self, version: Version) -> None:
        version.weights = None
        self._used.pop(version.key, None)

    @property
    def num_bytes(self) -> int:
        return sum(size.read for size in self._sizes(self._held()))

    def check(self, version: Version, size: AdapterSize, beside: Version | None) -> None:
        """UserError if a version of that size could never be served. `beside`: the one it replaces stays with it."""
        kept, others = self.known(beside, version)
        self.budget.check(version.name, kept, others, size, version.pinned)

    def known(self, beside: Version | None, new: Version) -> tuple[list[AdapterSize], list[AdapterSize]]:
        """Sizes of those that are never evicted, `beside` too, and of the others, without `new`."""
        others = [v for v in self._versions.values() if v is not new]
        kept = [v for v in others if v.kept or v is beside]
        return self._sizes(kept), self._sizes(v for v in others if v not in kept)

    def make_room(self, version: Version, size: AdapterSize, beside: Version | None) -> list[Version] | None:
        """Evict others than `beside` until a version of that size fits, and return what was evicted. None, and nothing
        is evicted: it does not fit until copies that are being made have ended."""
        known = [*self._sizes(v for v in self._versions.values() if v is not version), size]
        held = self._held()
        evicted: list[Version] = []
        while not self.budget.fits([*self._sizes(held), size], known):
            free = [v for v in held if not (v.kept or v.filling or v is beside)]
            victim = min(free, key=self._reluctance, default=None)
            if victim is None:
                return None
            held.remove(victim)
            evicted.append(victim)
        for victim in evicted:
            self.drop(victim)
        self.num_evictions += len(evicted)
        return evicted

    def check_integrity(self) -> None:
        """EngineError if what is held is not what is known to be, or more than may be."""
        held = {version.key for version in self._versions.values() if version.weights is not None}
        if held != set(self._used):
            raise EngineError(f"adapters {sorted(held)} are in host memory, {sorted(self._used)} are known to be")
        known = self._sizes(self._versions.values())
        if not self.budget.fits(self._sizes(self._held()), known):
            raise EngineError(f"{len(held)} adapters in host memory take more than their budget")

    def _reluctance(self, version: Version) -> tuple[bool, bool]:
        """Among equals the least recently used comes first: `held` is in that order."""
        return version.status is AdapterStatus.RETIRING, self._wanted(version.key)

    def _held(self) -> list[Version]:
        return [self._versions[key] for key in self._used]

    @staticmethod
    def _sizes(versions: Iterable[Version]) -> list[AdapterSize]:
        return [v.size for v in versions if v.size is not None and v.status is not AdapterStatus.FAILED]
