"""Weighted fair service between tenants: the Virtual Token Counter with counter lift.

Each tenant's counter is the service it got, per unit of weight; the next prompt tokens go to the smallest counter.
A tenant that had nothing waiting starts level with those that had, so that idling earns no credit. A tenant's
background work is an account of its own, level with other background work alone.
Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.request import Request, is_background

MAX_IDLE_TENANTS = 4096


@dataclass
class Tenant:
    weight: float = 1.0
    counter: float = 0.0
    service: float = 0.0  # unweighted and never lifted: for people to read
    num_waiting: int = 0
    num_live: int = 0  # waiting or running


class Fairness:
    """The accounts' counters. One without requests is forgotten when there are too many."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._last = {False: Tenant(), True: Tenant()}  # of each class, the last one to have something waiting

    def __getitem__(self, tenant: str) -> Tenant:
        return self._tenants[tenant]

    def num_waiting(self, name: str) -> int:
        return self._tenants[name].num_waiting if name in self._tenants else 0

    def arrive(self, name: str, weight: float) -> None:
        """A new request of the tenant begins to wait."""
        tenant = self._tenants.get(name)
        if tenant is None:
            self._forget_idle()
            tenant = self._tenants[name] = Tenant()
        tenant.weight = weight
        if not tenant.num_waiting:
            background = is_background(name)
            peers = (t for other, t in self._tenants.items() if t.num_waiting and is_background(other) is background)
            level = min((t.counter for t in peers), default=self._last[background].counter)
            tenant.counter = max(tenant.counter, level)
        tenant.num_waiting += 1
        tenant.num_live += 1

    def end(self, name: str) -> None:
        """A request of the tenant has ended."""
        self._tenants[name].num_live -= 1

    def wait_again(self, name: str) -> None:
        """A preempted request of the tenant waits."""
        self._tenants[name].num_waiting += 1

    def leave(self, name: str) -> None:
        """A request of the tenant waits no longer."""
        tenant = self._tenants[name]
        tenant.num_waiting -= 1
        if not tenant.num_waiting:
            self._last[is_background(name)] = tenant

    def charge(self, name: str, service: float) -> None:
        tenant = self._tenants[name]
        tenant.service += service
        tenant.counter += service / tenant.weight

    def services(self) -> dict[str, float]:
        return {name: tenant.service for name, tenant in self._tenants.items()}

    def problems(self, live: Sequence[Request], waiting: Sequence[Request]) -> list[str]:
        found = []
        for field, requests in (("num_live", live), ("num_waiting", waiting)):
            counts = Counter([request.account for request in requests])
            found += [
                f"tenant {name!r}: {field} is {getattr(tenant, field)}, {counts[name]} are known"
                for name, tenant in self._tenants.items()
                if getattr(tenant, field) != counts[name]
            ]
        return found

    def _forget_idle(self) -> None:
        # those at or below the level would be lifted to it anyway: nothing is lost
        if len(self._tenants) >= MAX_IDLE_TENANTS:
            for name, tenant in list(self._tenants.items()):
                if not tenant.num_live and tenant.counter <= self._last[is_background(name)].counter:
                    del self._tenants[name]
