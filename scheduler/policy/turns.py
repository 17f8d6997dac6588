"""Which streams leave a step out, so that it takes no longer than the inter-token latency that was asked for.

Streams of one tenant would gain nothing: half of them in a step of half the time. A tenant with few streams beside
one with many gains what the other's rows take. So a step that would be too long has room for each tenant's streams by
weight; what a tenant does not need goes to the others, and the streams of one take turns.

Where a single row of a tenant with many streams makes the step of one with few too long, it is in some steps only: in
as many as keep the mean step at the target, and in every SELDOM-th whatever the target is. Its prompts likewise.

A tenant with few streams waits for the step in flight when its next request comes, and for its prompt. So steps are
held to the target for some time after it was there, and other streams make room for its prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from scheduler.config import SchedulerConfig
from scheduler.plan import pairs
from scheduler.policy.cost import CostModel
from scheduler.policy.fairness import Fairness
from scheduler.policy.waiting import Entry, WaitingQueue
from scheduler.request import AdapterKey, Request, is_background

PRESENT_S = 10.0  # a tenant may come back so long after its last request has ended
SELDOM = 16  # steps
_FEW = 0.5  # of the most live requests for its weight that a tenant has: one with so many has few


@dataclass
class _There:
    """A tenant's live requests: behind their prompts, and all that run; tokens of prompts, positions read."""

    weight: float
    streams: list[Request] = field(default_factory=list)
    running: int = 0
    prompt_tokens: int = 0
    read: int = 0

    @property
    def share(self) -> float:
        return self.running / self.weight


class Turns:
    """Of one scheduler. Of the step last asked about: `chunk`, tokens of prompts that streams made room for; `held`,
    tenants of whose prompts nothing is computed; `first`, those whose prompts go before others'."""

    def __init__(self, config: SchedulerConfig, tenants: Fairness, cost: CostModel) -> None:
        self.chunk = 0
        self.held: frozenset[str] = frozenset()
        self.first: frozenset[str] = frozenset()
        self._config, self._tenants, self._cost = config, tenants, cost
        self._seen: dict[str, float] = {}  # when each account was last there, the newest last
        self._saved_s = 0.0  # by which steps without others' rows were shorter than the target
        self._without = 0  # such steps since the last one with them
        self._in_a_row = 0  # steps in which streams made room for prompts

    def left_out(
        self,
        running: Iterable[Entry],
        waiting: WaitingQueue,
        is_open: Callable[[AdapterKey], bool],
        step: int,
        now: float,
    ) -> frozenset[Request]:
        """Of the live requests behind their prompts. None while the cost model has too few samples, nor where the
        target is some decode steps. `is_open`: whether requests of an adapter may begin."""
        self.chunk, self.held, self.first = 0, frozenset(), frozenset()
        config, cost = self._config, self._cost
        target_s = config.itl_target_s
        if target_s is None or config.itl_decode_steps or cost.cautious_chunk is not None:
            return frozenset()
        there = self._look(running, waiting, is_open)
        self._note(there, now)
        if len(self._seen) < 2 or not any(each.streams for each in there.values()):
            return frozenset()
        count, read = (sum(parts) for parts in zip(*((len(t.streams), t.read) for t in there.values()), strict=True))
        most = max(each.share for each in there.values())
        behind = {name: each.prompt_tokens for name, each in there.items() if each.share < most and each.prompt_tokens}
        self.chunk = min(sum(behind.values()), config.initial_chunk)
        self._give_way(behind.keys())
        few = {name for name, each in there.items() if each.share <= _FEW * most}
        if few and self._apart(there, few, target_s):
            self.held = frozenset(there.keys() - few)
            return frozenset(request for name in self.held for request in there[name].streams)
        if cost.predict(count + self.chunk, read + pairs(0, self.chunk)) <= target_s:
            return frozenset()
        room = cost.rows(count, read, target_s, beside=self.chunk)
        return self._by_weight({name: each for name, each in there.items() if each.streams}, room, step)

    def _look(
        self, running: Iterable[Entry], waiting: WaitingQueue, is_open: Callable[[AdapterKey], bool]
    ) -> dict[str, _There]:
        found: dict[str, _There] = {}

        def of(account: str) -> _There:
            if account not in found:
                found[account] = _There(self._tenants[account].weight)
            return found[account]

        for _, _, request in running:
            if request.background:
                continue
            own = of(request.account)
            own.running += 1
            if (missing := len(request.prompt) - request.num_computed) > 0:
                own.prompt_tokens += missing
            elif len(request.output) + request.num_in_flight < request.most_output:  # the tokens in flight end others
                own.streams.append(request)
                own.read += request.num_computed + 1
        for name in waiting.accounts():
            if not is_background(name) and (first := waiting.first(name, is_open, ())) is not None:
                of(name).prompt_tokens += first.num_tokens
        return found

    def _apart(self, there: dict[str, _There], few: set[str], target_s: float) -> bool:
        """Whether this step is one of those with rows of tenants with few streams alone. While a prompt of theirs is
        computed, which takes longer than a row, the others' streams are beside it."""
        many = there.keys() - few
        if self.chunk or not any(there[name].streams for name in few):
            return False
        rows = sum(len(there[name].streams) for name in few)
        read = sum(there[name].read for name in few)
        alone_s = self._cost.predict(rows, read)
        others = sum(bool(there[name].streams) for name in many)
        if any(there[name].prompt_tokens for name in many):
            others += self._config.min_chunk
        over_s = self._cost.predict(rows + others, read) - target_s
        if over_s <= 0:
            self._saved_s, self._without = 0.0, 0
            return False
        if self._saved_s >= over_s or self._without + 1 >= SELDOM:
            self._saved_s, self._without = max(0.0, self._saved_s - over_s), 0
            return False
        self._saved_s, self._without = self._saved_s + max(0.0, target_s - alone_s), self._without + 1
        return True

    def _give_way(self, behind: Collection[str]) -> None:
        """To their prompts, at which others' would otherwise take the room that streams make: the service counted is
        that of tenants who leave steps out. Not without end, so each SELDOM-th step in a row has the usual order."""
        self._in_a_row = self._in_a_row + 1 if behind else 0
        self.first = frozenset(behind if self._in_a_row % SELDOM else ())

    def _by_weight(self, there: dict[str, _There], room: int, step: int) -> frozenset[Request]:
        """At least one of each is in the step, even if that makes it too long."""
        weight = sum(each.weight for each in there.values())
        found: list[Request] = []
        for each in sorted(there.values(), key=lambda each: len(each.streams) / each.weight):
            mine = each.streams
            taken = min(len(mine), max(1, int(room * each.weight / weight)))
            room, weight = max(0, room - taken), weight - each.weight
            if taken < len(mine):
                mine.sort(key=lambda request: request.turn)
                found += mine[taken:]
            for place, request in enumerate(mine[:taken]):  # behind those that have waited longer
                request.turn = step + place / taken
        return frozenset(found)

    def _note(self, there: Iterable[str], now: float) -> None:
        for name in there:
            self._seen.pop(name, None)
            self._seen[name] = now
        for name, when in list(self._seen.items()):
            if now - when <= PRESENT_S:
                break
            del self._seen[name]
