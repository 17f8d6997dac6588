"""The requests that wait, by account and adapter, each list in order of rank."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterator
from itertools import islice

from scheduler.request import AdapterKey, Request, is_background

Entry = tuple[float, int, Request]  # rank and arrival, which is unique: requests are never compared


def entry(request: Request) -> Entry:
    return request.rank, request.arrival, request


class WaitingQueue:
    """Iterating over it is in no order of rank across accounts and adapters."""

    def __init__(self) -> None:
        self._lists: dict[str, dict[AdapterKey, list[Entry]]] = {}
        self._count = 0
        self.num_live = 0  # those that are not background work

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        for adapters in self._lists.values():
            for entries in adapters.values():
                for _, _, request in entries:
                    yield request

    def add(self, request: Request) -> None:
        insort(self._lists.setdefault(request.account, {}).setdefault(request.adapter, []), entry(request))
        self._count += 1
        self.num_live += not request.background

    def remove(self, request: Request) -> None:
        adapters = self._lists[request.account]
        entries = adapters[request.adapter]
        del entries[bisect_left(entries, entry(request))]
        if not entries:
            del adapters[request.adapter]
            if not adapters:
                del self._lists[request.account]
        self._count -= 1
        self.num_live -= not request.background

    def accounts(self) -> list[str]:
        return list(self._lists)

    def first(self, account: str, is_open: Callable[[AdapterKey], bool], put_off: Container[Request]) -> Request | None:
        """The account's best request whose adapter is open, leaving out those put off, those held and those whose
        sampled token is still to come in."""
        return next(iter(self.first_few(account, is_open, put_off, 1)), None)

    def first_few(
        self, account: str, is_open: Callable[[AdapterKey], bool], put_off: Container[Request], count: int
    ) -> list[Request]:
        """As `first`, the best `count` of them, best first."""
        best: list[Entry] = []
        for adapter, entries in self._lists.get(account, {}).items():
            if (len(best) < count or entries[0][:2] < best[-1][:2]) and is_open(adapter):
                ready = (e for e in entries if not (e[2] in put_off or e[2].held or e[2].num_in_flight))
                best = sorted([*best, *islice(ready, count)], key=lambda e: e[:2])[:count]
        return [request for _, _, request in best]

    def best_ranks(self, *, background: bool) -> dict[AdapterKey, tuple[float, int]]:
        ranks: dict[AdapterKey, tuple[float, int]] = {}
        for adapters in (lists for account, lists in self._lists.items() if is_background(account) is background):
            for adapter, entries in adapters.items():
                rank = entries[0][:2]
                if adapter not in ranks or rank < ranks[adapter]:
                    ranks[adapter] = rank
        return ranks

    def has(self, adapter: AdapterKey) -> bool:
        return any(adapter in adapters for adapters in self._lists.values())

    def of_adapter(self, adapter: AdapterKey) -> list[Request]:
        found = [e for adapters in self._lists.values() for e in adapters.get(adapter, ())]
        return [request for _, _, request in sorted(found, key=lambda e: e[:2])]
