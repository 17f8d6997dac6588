"""Which replica a request goes to: where its adapter is, then where its prompt's beginning was, then where least is
open. Knows nothing of Ray; the simulator drives it too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

SLOT, HOST, DISK = range(3)
_CHARS = 256  # of a prompt: a block
_BLOCKS = 64  # that are looked at


@dataclass(frozen=True)
class Affinity:
    """`slots`, `host`: adapters that a replica has in slots, and in host memory with those. `slack`: more open requests
    above the least loaded replica's, and a replica gets no request for what it has. `remembered`: blocks of prompts
    that a replica is assumed to have."""

    slots: int = 8
    host: int = 64
    slack: int = 8
    remembered: int = 4096

    def __post_init__(self) -> None:
        if not 0 < self.slots <= self.host:
            raise ValueError(f"slots is {self.slots}, host {self.host}: 0 < slots <= host")
        if self.slack < 1 or self.remembered < 0:
            raise ValueError(f"slack is {self.slack}, at least 1; remembered {self.remembered}, at least 0")


class Policy:
    """Remembers what was sent where, and what replicas told of their adapters. Of one that tells nothing, the most
    recently used adapters are taken to be in its slots, the next in its host memory. What is assumed wrongly costs a
    load or a prefill, nothing else. Replicas are any hashable names."""

    def __init__(self, settings: Affinity) -> None:
        self._settings = settings
        self._adapters: dict[str, OrderedDict[str, None]] = {}  # by replica, the last used last
        self._blocks: dict[str, OrderedDict[bytes, None]] = {}
        self._told: dict[str, dict[str, int]] = {}  # by replica: the tiers of its adapters
        self._since: dict[str, tuple[set[str], set[str]]] = {}  # sent since the last report, and since the one before

    def rank(self, open_requests: Mapping[str, int], adapter: str, blocks: Sequence[bytes]) -> list[str]:
        """Replicas, the best first. `open_requests` of each; `adapter` "" is the base; `blocks` are of `prefix`."""
        least = min(open_requests.values(), default=0)
        tiers = {replica: self.tier(replica, adapter) for replica in open_requests}
        # replicas start with the same adapters: one that has told nothing yet has it too
        if any(told.get(adapter) == HOST for told in self._told.values()):
            tiers |= {replica: HOST for replica, tier in tiers.items() if tier == DISK and replica not in self._told}

        def key(replica: str) -> tuple[bool, int, int, int, bytes]:
            busy = open_requests[replica] > least + self._settings.slack
            tier = tiers[replica]
            # no slot has it: the same replica for all routers, so that it stays on one
            home = _home(replica, adapter) if tier != SLOT else b""
            return busy, tier, -self._matched(replica, blocks), 0 if home else open_requests[replica], home

        return sorted(open_requests, key=key)

    def tier(self, replica: str, adapter: str) -> int:
        """SLOT, HOST or DISK, as far as is known; the base is everywhere."""
        known = self._adapters.get(replica, OrderedDict())
        if not adapter:
            return SLOT
        if replica in self._told:
            on_its_way = any(adapter in sent for sent in self._since[replica])
            return SLOT if on_its_way else self._told[replica].get(adapter, DISK)
        if adapter not in known:
            return DISK
        age = next(i for i, name in enumerate(reversed(known)) if name == adapter)
        return SLOT if age < self._settings.slots else HOST

    def update_adapters(self, replica: str, slot: Iterable[str], host: Iterable[str]) -> None:
        """A replica's report: its adapters in slots and in host memory. What was sent there shortly before may not be
        in it yet: it counts until the next report."""
        self._told[replica] = {**dict.fromkeys(host, HOST), **dict.fromkeys(slot, SLOT)}
        self._since[replica] = (set(), self._since.get(replica, (set(), set()))[0])

    def sent(self, replica: str, adapter: str, blocks: Sequence[bytes]) -> None:
        if adapter and replica in self._since:
            self._since[replica][0].add(adapter)
        if adapter:
            _touch(self._adapters.setdefault(replica, OrderedDict()), (adapter,), self._settings.host)
        _touch(self._blocks.setdefault(replica, OrderedDict()), blocks, self._settings.remembered)

    def keep(self, replicas: Sequence[str]) -> None:
        """Forget all others: they ended, and what follows them begins with nothing."""
        for known in (self._adapters, self._blocks, self._told, self._since):
            for replica in known.keys() - set(replicas):
                del known[replica]

    def _matched(self, replica: str, blocks: Sequence[bytes]) -> int:
        known = self._blocks.get(replica, ())
        return next((i for i, block in enumerate(blocks) if block not in known), len(blocks))


def prefix(scope: str, prompt: str) -> list[bytes]:
    """Each whole block of the prompt as a hash of it and all before it. `scope`: requests of different ones share
    nothing (a key and a model)."""
    found, before = [], scope.encode(errors="replace")
    for i in range(min(_BLOCKS, len(prompt) // _CHARS)):
        text = prompt[i * _CHARS : (i + 1) * _CHARS].encode(errors="replace")
        before = blake2b(before + b"\0" + text, digest_size=16).digest()
        found.append(before)
    return found


def _touch(known: OrderedDict[str, None] | OrderedDict[bytes, None], names: Sequence[str | bytes], most: int) -> None:
    for name in names:
        known[name] = None  # type: ignore[index]
        known.move_to_end(name)  # type: ignore[arg-type]
    while len(known) > most:
        known.popitem(last=False)


def _home(replica: str, adapter: str) -> bytes:
    """Rendezvous hashing: of a replica that is gone, only its own adapters move."""
    return blake2b(f"{replica}\0{adapter}".encode(errors="replace"), digest_size=8).digest()
