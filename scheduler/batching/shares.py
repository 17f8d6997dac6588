"""Who gives way when running slots (requests that run at once), blocks or places in the queue run out.

A tenant alone has all of them. Beside others it keeps its share by weight: what it has beyond that moves to a tenant
with less. The giver had more for its weight than the taker has then, so that nothing ever moves back. A tenant without
a running slot gets one, whatever its weight, and nobody loses the last one. Background work shares what live requests
leave: its accounts compete among themselves, and it gives way first.
"""

from __future__ import annotations

from collections import Counter

from scheduler.core import Core
from scheduler.request import Request, Status, is_background


class Shares:
    """What the tenants of running requests hold now."""

    def __init__(self, core: Core) -> None:
        self._running = [request for _, _, request in core.running]
        self._tenants = core.fairness
        self._running_slots: Counter[str] = Counter()
        self._blocks: Counter[str] = Counter()
        for request in self._running:
            self._running_slots[request.account] += 1
            self._blocks[request.account] += len(request.blocks)

    def running_slots(self, tenant: str) -> float:
        """For its weight."""
        return self._running_slots[tenant] / self._tenants[tenant].weight

    def standing(self, request: Request) -> tuple[bool, bool, float, float, int]:
        """Of the running requests, the one with the largest is the first to be preempted for want of blocks."""
        tenant = request.account
        blocks = self._blocks[tenant] / self._tenants[tenant].weight
        return request.background, self._running_slots[tenant] > 1, blocks, request.rank, request.arrival

    def running_slot_from(self, tenant: str) -> Request | None:
        """The running request that is preempted for a waiting one of the tenant."""
        return self._newest(self._giver(self._running_slots, tenant, 1))

    def blocks_from(self, tenant: str, need: int) -> Request | None:
        """The running request that gives its blocks to a waiting one of the tenant, which lacks `need` of them."""
        return self._newest(self._giver(self._blocks, tenant, need))

    def _giver(self, held: Counter[str], taker: str, need: int) -> str | None:
        """Of those that got no less service and have more than one, the one that holds the most for its weight, if that
        is more than the taker would have. For the taker's first it always is."""
        tenants, mine = self._tenants, self._tenants[taker]
        others = [
            name
            for name, count in self._running_slots.items()
            if name != taker
            and is_background(name) is is_background(taker)
            and count > 1
            and tenants[name].counter >= mine.counter
        ]
        giver = max(others, key=lambda name: held[name] / tenants[name].weight, default=None)
        if giver is None or not self._running_slots[taker]:
            return giver
        return giver if held[giver] / tenants[giver].weight > (held[taker] + need) / mine.weight else None

    def _newest(self, tenant: str | None) -> Request | None:
        return next((request for request in reversed(self._running) if request.account == tenant), None)


def evicted(core: Core, tenant: str, weight: float) -> Request | None:
    """The waiting request that has to leave a full queue for one of `tenant`, an account: the last of the one with the
    most waiting for its weight, if that is more than `tenant` then has. Requests that ran before stay."""
    waiting = {
        name: core.fairness[name] for name in core.waiting.accounts() if is_background(name) is is_background(tenant)
    }
    mine = waiting[tenant].num_waiting if tenant in waiting else 0
    others = [t for name, t in waiting.items() if name != tenant and t.num_waiting > 1]
    most = max((t.num_waiting / t.weight for t in others), default=0.0)
    if mine and most <= (mine + 1) / weight:
        return None
    never_ran = [
        request
        for request in core.waiting
        if request.status is Status.WAITING
        and waiting.get(request.account) in others
        and waiting[request.account].num_waiting / waiting[request.account].weight == most
    ]
    return max(never_ran, key=lambda request: (request.rank, request.arrival), default=None)
