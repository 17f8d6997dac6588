"""One trace through the real scheduler. The clock stands still while the scheduler decides."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from heapq import heappop, heappush

from loadtests.simulate.cost import LaneCost, StepCost
from loadtests.simulate.fairness import Gap
from loadtests.simulate.traces import Trace
from scheduler.config import SchedulerConfig
from scheduler.plan import EventKind, StepPlan, StepRow
from scheduler.request import BASE, AdapterKey, Request, SamplingParams
from scheduler.scheduler import AdmissionError, Scheduler

_WORDS = 30_000


@dataclass
class Seen:
    """Of a request, in seconds. `token_s`: when each token came."""

    tenant: str
    prompt_tokens: int
    asked_s: float
    token_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.asked_s

    @property
    def itl_s(self) -> list[float]:
        return [after - before for before, after in zip(self.token_s, self.token_s[1:], strict=False)]


@dataclass
class Slots:
    """`uses`: requests that began to run with an adapter; `cold`: those of them that were the first in their slot since
    its adapter was loaded into it."""

    uses: int = 0
    cold: int = 0


@dataclass
class Outcome:
    """What a run came to. `stats` are the scheduler's own at the end."""

    seconds: float
    steps: int
    requests: list[Seen]
    refused: int
    gap: Gap
    slots: Slots
    stats: dict[str, float | int]


class Simulation:
    """`load_s`: an adapter's way into a slot, with steps going on meanwhile. `lane`: what steps of long prompts take,
    if `config` has a lane of them."""

    def __init__(
        self, config: SchedulerConfig, cost: StepCost, load_s: float = 0.05, lane: LaneCost | None = None
    ) -> None:
        if (lane is None) is not (config.lane_tokens is None):
            raise ValueError("lane_tokens and what steps of that lane take: both, or neither")
        self._scheduler = Scheduler(config)
        self._cost, self._load_s, self._lane = cost, load_s, lane
        self._prompts: tuple[StepPlan, float, float] | None = None  # in that lane: its begin and end
        self._now = 0.0
        self._arrivals: list[tuple[float, int, int]] = []  # time, conversation, turn
        self._loads: list[tuple[float, int]] = []  # time, slot
        self._contexts: list[list[int]] = []  # by conversation
        self._seen: dict[str, Seen] = {}
        self._slots = Slots()
        self._began: set[str] = set()  # requests that ran with an adapter
        self._unused: set[int] = set()  # slots that nothing has run in since they were loaded
        self._refused = self._steps = 0
        self._gap = Gap(config.prefill_weight, config.decode_weight)

    def run(self, trace: Trace) -> Outcome:
        """Until everything has been answered. RuntimeError if requests wait that nothing will wake."""
        self.begin(trace)
        for number in range(len(trace)):
            self.arrive(number)
        self.advance(math.inf)
        return self.outcome()

    def begin(self, trace: Trace) -> None:
        """Of which `arrive` brings some."""
        self._trace = trace
        self._contexts = [[] for _ in trace]

    def arrive(self, number: int) -> None:
        """A conversation begins at its time, or now if that has passed."""
        heappush(self._arrivals, (self._trace[number].start_s, number, 0))

    def advance(self, until_s: float) -> None:
        """Steps until then, or until nothing is left; the last may end later. RuntimeError as `run`."""
        while self._now < until_s and (self._arrivals or self._scheduler.has_work()):
            self._let_in()
            self._tend_lane()
            plan = self._scheduler.schedule(self._now)
            for load in self._scheduler.slot_loads():
                heappush(self._loads, (self._now + self._load_s, load.slot))
            if plan is None:
                self._skip(until_s)
                continue
            self._steps += 1
            self._step(plan)

    @property
    def open_requests(self) -> int:
        """That run or wait."""
        return len(self._scheduler.requests()) + len(self._arrivals)

    def outcome(self) -> Outcome:
        seen, stats = list(self._seen.values()), self._scheduler.stats()
        return Outcome(self._now, self._steps, seen, self._refused, self._gap, self._slots, stats)

    def _let_in(self) -> None:
        while self._loads and self._loads[0][0] <= self._now:
            slot = heappop(self._loads)[1]
            self._scheduler.slot_loaded(slot)
            self._unused.add(slot)
        while self._arrivals and self._arrivals[0][0] <= self._now:
            asked_s, number, turn = heappop(self._arrivals)
            self._ask(asked_s, number, turn)

    def _skip(self, until_s: float) -> None:
        """To the next thing that happens by itself, not beyond `until_s`."""
        soonest = [heap[0][0] for heap in (self._arrivals, self._loads) if heap]
        soonest += [self._prompts[2]] if self._prompts else []
        if not soonest:
            raise RuntimeError(f"{self._scheduler.num_waiting} requests wait and nothing can run")
        self._now = max(self._now, min(*soonest, until_s))

    def _ask(self, asked_s: float, number: int, turn: int) -> None:
        conversation = self._trace[number]
        asked = conversation.turns[turn]
        context = self._contexts[number]
        context += asked.prompt
        request_id = f"{number}.{turn}"
        adapter = AdapterKey(conversation.adapter, 1) if conversation.adapter else BASE
        sampling = SamplingParams(max_tokens=asked.output, ignore_eos=True)
        request = Request(
            request_id,
            list(context),
            sampling,
            adapter,
            conversation.tenant,
            system_tokens=conversation.system_tokens,
            part_ends=asked.ends_behind(len(context) - len(asked.prompt)),
        )
        try:
            evicted = self._scheduler.add(request, asked_s, conversation.weight)
        except AdmissionError:
            self._refused += 1
            return
        self._seen[request_id] = Seen(conversation.tenant, len(context), asked_s)
        self._gap.arrived(conversation.tenant, conversation.weight, len(context))
        if evicted is not None:
            self._refused += 1
            del self._seen[evicted.request.request_id]

    def _step(self, plan: StepPlan) -> None:
        self._gap.look(self._scheduler)
        self._count_uses(plan)
        seconds = self._cost.seconds(plan)
        if self._lane is not None and self._prompts is not None:  # as long as both are computed
            left = self._prompts[2] - self._now
            seconds = min(seconds * self._lane.slower, seconds + left * (1 - 1 / self._lane.slower))
        self._now += seconds
        self._commit(plan, seconds, self._now)

    def _tend_lane(self) -> None:
        """Commit its step that has ended by now, and begin the next."""
        if self._prompts is not None and self._prompts[2] <= self._now:
            (plan, began_s, ended_s), self._prompts = self._prompts, None
            self._commit(plan, ended_s - began_s, ended_s)
        if self._lane is not None and (begun := self._scheduler.schedule_prompts(self._now)) is not None:
            self._steps += 1
            self._gap.look(self._scheduler)
            self._count_uses(begun)
            self._prompts = begun, self._now, self._now + self._lane.seconds(begun)

    def _commit(self, plan: StepPlan, seconds: float, ended_s: float) -> None:
        tokens = [[_word(row)] if row.samples else [] for row in plan.rows]
        events = self._scheduler.commit(plan, tokens, self._now)
        self._scheduler.observe(plan, seconds, round(self._cost.experts(plan.num_tokens)))
        for event in events:
            seen = self._seen[event.request.request_id]
            seen.token_s += [ended_s] * len(event.tokens)
            if event.kind is EventKind.FINISHED:
                self._answered(event.request)

    def _count_uses(self, plan: StepPlan) -> None:
        for row in plan.rows:
            if row.adapter_slot and row.request.request_id not in self._began:
                self._began.add(row.request.request_id)
                self._slots.uses += 1
                self._slots.cold += row.adapter_slot in self._unused
            self._unused.discard(row.adapter_slot)

    def _answered(self, request: Request) -> None:
        number, turn = map(int, request.request_id.split("."))
        self._contexts[number] += request.output
        turns = self._trace[number].turns
        if turn + 1 < len(turns):
            heappush(self._arrivals, (self._now + turns[turn + 1].wait_s, number, turn + 1))


def _word(row: StepRow) -> int:
    """One that depends on the request and the position alone."""
    return (zlib.crc32(row.request.request_id.encode()) + 7919 * row.start) % _WORDS
