"""Which streams leave a step out, so that it takes no longer than the inter-token latency that was asked for.

Streams of one tenant would gain nothing: half of them in a step of half the time. A tenant with few streams beside
one with many gains what the other's rows take. So a step that would be too long has room for each tenant's streams by
weight; what a tenant does not need goes to the others, and the streams of one take turns.

A tenant with few streams waits for the step in flight when its next request comes, and for its prompt. So steps are
held to the target for some time after it was there, and other streams make room for its prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from scheduler.config import SchedulerConfig
from scheduler.plan import pairs
from scheduler.policy.cost import CostModel
from scheduler.policy.fairness import Fairness
from scheduler.policy.waiting import Entry, WaitingQueue
from scheduler.request import AdapterKey, Request, is_background

PRESENT_S = 10.0  # a tenant may come back so long after its last request has ended


class Turns:
    """Of one scheduler. `chunk`: tokens of prompts that streams made room for in the step last asked about."""

    def __init__(self, config: SchedulerConfig, tenants: Fairness, cost: CostModel) -> None:
        self.chunk = 0
        self._config, self._tenants, self._cost = config, tenants, cost
        self._seen: dict[str, float] = {}  # when each account was last there, the newest last

    def left_out(
        self,
        running: Iterable[Entry],
        waiting: WaitingQueue,
        is_open: Callable[[AdapterKey], bool],
        step: int,
        now: float,
    ) -> frozenset[Request]:
        """Of the live requests behind their prompts. None while the cost model has too few samples, nor where the
        target is some decode steps; one of each tenant is in the step even if that makes it too long. `is_open`:
        whether requests of an adapter may begin."""
        self.chunk = 0
        config, tenants, cost = self._config, self._tenants, self._cost
        target_s = config.itl_target_s
        if target_s is None or config.itl_decode_steps or cost.cautious_chunk is not None:
            return frozenset()
        streams: dict[str, list[Request]] = {}  # by tenant
        prompts: dict[str, int] = {}  # tokens, by tenant
        count = read = 0
        for _, _, request in running:
            if request.background:
                continue
            if (missing := len(request.prompt) - request.num_computed) > 0:
                prompts[request.account] = prompts.get(request.account, 0) + missing
                continue
            streams.setdefault(request.account, []).append(request)
            count += 1
            read += request.num_computed + 1
        for name in waiting.accounts():
            if not is_background(name) and (first := waiting.first(name, is_open, ())) is not None:
                prompts[name] = prompts.get(name, 0) + first.num_tokens
        self._note({*streams, *prompts}, now)
        if not streams or len(self._seen) < 2:
            return frozenset()
        most = max(len(each) / tenants[name].weight for name, each in streams.items())
        behind = (n for name, n in prompts.items() if len(streams.get(name, ())) / tenants[name].weight < most)
        self.chunk = min(sum(behind), config.initial_chunk)
        if cost.predict(count + self.chunk, read + pairs(0, self.chunk)) <= target_s:
            return frozenset()
        room = cost.rows(count, read, target_s, beside=self.chunk)
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

    def _note(self, there: set[str], now: float) -> None:
        for name in there:
            self._seen.pop(name, None)
            self._seen[name] = now
        for name, when in list(self._seen.items()):
            if now - when <= PRESENT_S:
                break
            del self._seen[name]
