"""Which streams leave a step out, so that it takes no longer than the inter-token latency that was asked for.

Streams of one tenant would gain nothing: half of them in a step of half the time. A tenant with few streams beside
one with many gains what the other's rows take. So a step that would be too long has room for each tenant's streams by
weight; what a tenant does not need goes to the others, and the streams of one take turns.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.config import SchedulerConfig
from scheduler.policy.cost import CostModel
from scheduler.policy.fairness import Fairness
from scheduler.policy.waiting import Entry
from scheduler.request import Request


def left_out(
    running: Iterable[Entry], tenants: Fairness, cost: CostModel, config: SchedulerConfig, step: int
) -> frozenset[Request]:
    """Of the live requests behind their prompts. None while the cost model has too few samples, nor where the target is
    some decode steps; one of each tenant is in the step even if that makes it too long."""
    target_s = config.itl_target_s
    if target_s is None or config.itl_decode_steps or cost.cautious_chunk is not None:
        return frozenset()
    streams: dict[str, list[Request]] = {}  # by tenant
    count = read = 0
    for _, _, request in running:
        if request.num_computed >= len(request.prompt) and not request.background:
            streams.setdefault(request.account, []).append(request)
            count += 1
            read += request.num_computed + 1
    if len(streams) < 2 or cost.predict(count, read) <= target_s:
        return frozenset()
    room = cost.rows(count, read, target_s)
    weight = sum(tenants[name].weight for name in streams)
    found: list[Request] = []
    for name in sorted(streams, key=lambda name: len(streams[name]) / tenants[name].weight):
        mine, own = streams[name], tenants[name].weight
        taken = min(len(mine), max(1, int(room * own / weight)))
        room, weight = max(0, room - taken), weight - own
        if taken < len(mine):
            mine.sort(key=lambda request: request.turn)
            found += mine[taken:]
        for place, request in enumerate(mine[:taken]):  # behind those that have waited longer
            request.turn = step + place / taken
    return frozenset(found)
