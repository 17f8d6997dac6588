"""The scheduler's face: requests in, step plans out, tokens in, events out. Pure logic: no torch, no clock, no threads.

add -> [schedule -> StepPlan -> (engine launches) -> commit -> events] ... -> one terminal event a request
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from scheduler.batching.batch import Batch
from scheduler.batching.drafting import drafts_follow
from scheduler.batching.prompts import PromptBatch
from scheduler.batching.shares import evicted
from scheduler.config import SchedulerConfig
from scheduler.core import Core, Flight
from scheduler.drafts import Drafter
from scheduler.errors import IntegrityError
from scheduler.memory.states import StatePool
from scheduler.plan import AdmissionError, Event, EventKind, SlotLoad, StepPlan, StepRow
from scheduler.policy.cost import CostModel
from scheduler.policy.gaps import Gaps
from scheduler.policy.pace import Pace
from scheduler.policy.turns import Turns
from scheduler.request import BASE, AdapterKey, Request, Status, is_background

__all__ = ["AdmissionError", "IntegrityError", "Scheduler", "SchedulerConfig"]

_RUNNING, _TOKENS = Status.RUNNING, EventKind.TOKENS  # asked for every row
_STATUS = {
    EventKind.FINISHED: Status.FINISHED,
    EventKind.REFUSED: Status.REFUSED,
    EventKind.CANCELLED: Status.CANCELLED,
    EventKind.FAILED: Status.FAILED,
}


class Scheduler:
    """Continuous batching over paged KV, adapter slots and fair tenants.

    Times are seconds of the caller's clock, which must not run backwards. Ended requests are forgotten: their last
    event is returned once, by whichever call ended them. `drafter`: decode rows carry the drafts that it chooses.
    `disk`, if the config has one, says which blocks are to be written and read, and is told when they were; `stored`:
    keys and sizes of what is there, least recently used first.
    """

    def __init__(
        self, config: SchedulerConfig, drafter: Drafter | None = None, stored: Iterable[tuple[bytes, int]] = ()
    ) -> None:
        self.config = config
        self._core = Core(config, drafter, stored)
        self.disk = self._core.disk
        self._cost = CostModel(config.initial_chunk)
        self._pace = Pace()
        self._gaps = Gaps()
        self._turns = Turns(config, self._core.fairness, self._cost)
        self._eos = frozenset(config.eos_token_ids)
        self._most_held = config.max_tokens_held
        self._block_size = config.block_size
        self._step = 0
        self._num_prefill_tokens = 0
        self._num_decode_tokens = 0
        self._num_drafted_tokens = 0
        self._num_accepted_tokens = 0
        self._num_committed = 0  # tokens of the step that was committed last

    # ---- requests

    def add(
        self, request: Request, now: float, tenant_weight: float = 1.0, max_waiting: int | None = None
    ) -> Event | None:
        """Take a request into the queue, or raise AdmissionError. A larger weight means a larger share of service, of
        running slots and of the queue, in which background requests take no place from live ones; a tenant with
        `max_waiting` requests in the queue is refused more. If the queue is full, a waiting request of a tenant with
        more than its share leaves it: its REFUSED is returned."""
        core, config = self._core, self.config
        if request.request_id in core.requests:
            raise AdmissionError("duplicate", f"request {request.request_id!r} is in flight already")
        if not request.prompt:
            raise AdmissionError("empty_prompt", "the prompt has no tokens, at least 1 is needed")
        if "\0" in request.tenant:
            raise AdmissionError("invalid_tenant", f"the tenant's name {request.tenant!r} holds a NUL character")
        if request.adapter != BASE and not config.num_adapter_slots:
            raise AdmissionError("no_adapter_slots", "this server has no adapter slots")
        self._check_length(request)
        if not 0 < tenant_weight < float("inf"):
            raise AdmissionError(
                "invalid_weight",
                f"the weight of tenant {request.tenant!r} is {tenant_weight}, must be a finite number above 0",
            )
        event = None
        waiting = len(core.waiting) if request.background else core.num_live_waiting
        if max_waiting is not None and core.fairness.num_waiting(request.account) >= max_waiting:
            full = f"{max_waiting} requests of this tenant are waiting, its limit"
            raise AdmissionError("queue_full", full, self._pace.retry_after_s(waiting))
        if waiting >= config.max_queue:
            full = f"{waiting} requests are waiting, the limit is {config.max_queue}"
            retry_after_s = self._pace.retry_after_s(waiting)
            victim = evicted(core, request.account, tenant_weight)
            if victim is None:
                raise AdmissionError("queue_full", full, retry_after_s)
            event = replace(self._end(victim, EventKind.REFUSED, full), retry_after_s=retry_after_s)
        request.ending = frozenset(request.sampling.ending_tokens(self._eos))
        request.most_output = min(request.sampling.max_tokens, self._most_held - len(request.prompt))
        core.arrive(request, now, tenant_weight)
        return event

    def abort(self, request_id: str, reason: str) -> Event | None:
        """The request is in no plan from now on. None if it is unknown or has ended."""
        return self._end_known(request_id, EventKind.CANCELLED, reason)

    def fail(self, request_id: str, reason: str, *, spoiled: bool = False) -> Event | None:
        """`spoiled`: what it computed may be wrong, so that nobody is to find it in the prefix cache."""
        if spoiled and (request := self._core.requests.get(request_id)) is not None:
            self._core.spoil(request)
        return self._end_known(request_id, EventKind.FAILED, reason)

    def refuse(self, request_id: str, reason: str) -> Event | None:
        """For a request that waits for something that will not come. One that ran before fails instead."""
        request = self._core.requests.get(request_id)
        never_ran = request is None or request.status is Status.WAITING
        return self._end_known(request_id, EventKind.REFUSED if never_ran else EventKind.FAILED, reason)

    def release(self, request_id: str) -> None:
        """What a held request waited for is there. Unknown ones have ended."""
        if (request := self._core.requests.get(request_id)) is not None:
            request.held = False

    def finish(self, request_id: str, num_tokens: int) -> Event | None:
        """A stop string was found: the output ends after `num_tokens` tokens, later ones are dropped."""
        request = self._core.requests.get(request_id)
        if request is None:
            return None
        if num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens}, must be at least 0")
        del request.output[num_tokens:]
        return self._end(request, EventKind.FINISHED, "stop")

    def expire(self, now: float) -> list[Event]:
        """Cancel the requests whose deadline has passed."""
        late = self._core.deadlines.take_late(now)
        return [self._end(request, EventKind.CANCELLED, "timeout") for request in late]

    # ---- steps

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step; None if nothing can run now. The step counts as launched until `commit` or `drop`.

        At most two steps are in flight: raises IntegrityError when a third is asked for.
        """
        if self.disk is not None:
            self.disk.expire(now)
        return self._planned(Batch(self._core, self._cost, self._gaps, self._turns).build(self._step, now))

    def schedule_prompts(self, now: float) -> StepPlan | None:
        """Plan the next step of the lane of long prompts, which is computed beside the others and committed like them;
        None while one is in flight, or if too few tokens of prompts wait."""
        if self.config.lane_tokens is None:
            return None
        return self._planned(PromptBatch(self._core, self._cost, self._gaps, self._turns).build(self._step, now))

    def _planned(self, flight: Flight | None) -> StepPlan | None:
        if flight is None:
            return None
        self._step += 1
        plan = flight.plan
        self._num_decode_tokens += plan.num_decodes
        self._num_prefill_tokens += sum(row.num_tokens for row in plan.rows[plan.num_decodes :])
        return plan

    def commit(self, plan: StepPlan, tokens: Sequence[list[int]], now: float) -> list[Event]:
        """Take a step's tokens: `tokens[i]` is row i's, empty if it does not sample; else the drafts that were
        accepted, from the first one on, and the token sampled after them.

        Steps of a lane are committed in order. Rows of requests that have ended since are ignored. An end-of-sequence
        or stop token ends its request as "stop" and is not part of the output; the token that reaches max_tokens or the
        length limit is. Tokens after the one that ended a request are dropped.
        """
        core = self._core
        lane = core.lane(plan.prompts)
        if not lane or lane[0].plan is not plan:
            raise IntegrityError(f"step {plan.step} is not the oldest step in flight")
        flight = lane[0]
        if len(tokens) != len(plan.rows):
            raise IntegrityError(f"step {plan.step}: tokens for {len(tokens)} rows, it has {len(plan.rows)}")
        wrong = [
            row.request.request_id
            for row, new in zip(plan.rows, tokens, strict=True)
            if len(new) != row.samples and row.request not in flight.void and not _fits(row, new)
        ]
        if wrong:
            raise IntegrityError(
                f"step {plan.step}: not accepted drafts and one token per sampling row for requests {wrong}"
            )
        core.flights.remove(flight)
        if core.drafter is not None:
            self._num_committed = sum(map(len, tokens))
        events, void, take = [], flight.void, self._take_tokens
        if plan.prompts:  # not findable before: a step beside it would have read what is not there yet
            for row in plan.rows:
                if row.request not in void and row.request.status is _RUNNING:
                    core.publish(row.request)
        for row, new in zip(plan.rows, tokens, strict=True):
            request = row.request
            if request not in void:
                if row.samples:
                    events.append(take(row, new))
                elif row.start + row.num_tokens == request.num_tokens and not request.sampling.max_tokens:
                    events.append(self._end(request, EventKind.FINISHED, "length"))
        core.land(flight)
        finished = [event.request for event in events if event.kind is not _TOKENS]
        self._pace.ended(len(finished), now)
        for request in finished:
            if not request.background:
                self._gaps.ended(now - request.arrival_s, now)
        return events

    def take_proposals(self, proposals: Mapping[str, Sequence[int]]) -> None:
        """Behind `commit`: what the model says may follow the output of requests, by their ids, as drafts of the next
        step. Requests that have ended are ignored."""
        drafter = self._core.drafter
        if drafter is None:
            return
        for request_id, tokens in proposals.items():
            if (request := self._core.requests.get(request_id)) is not None:
                drafter.take(request, tokens)

    def drop(self, plan: StepPlan) -> list[Event]:
        """The step failed in the engine: its requests fail; others that shared blocks it wrote are recomputed."""
        core = self._core
        flight = self._flight(plan)
        core.flights.remove(flight)
        core.undo(flight)
        failed = [row.request for row in plan.rows if row.request not in flight.void]
        events = [self._end(request, EventKind.FAILED, "the step failed") for request in failed]
        core.land(flight)
        return events

    def observe(self, plan: StepPlan, seconds: float, experts: int | None) -> None:
        """How long the step took, and how many distinct experts it touched over all layers, if that is known."""
        config = self._core.config
        if self.disk is not None:
            self.disk.observe(plan, seconds)
        if plan.prompts:
            self._cost.prompt_step_s = seconds
            return
        if self._core.drafter is not None:
            self._core.drafter.observe(plan, self._num_committed, seconds)
        if config.itl_target_s is None and not plan.rows[0].request.background:
            return  # nobody asks what such a step will take
        if config.long_chunk is not None and plan.num_tokens >= config.long_chunk and not plan.rows[0].is_decode:
            return
        self.learn(plan, seconds, experts)

    def learn(self, plan: StepPlan, seconds: float, experts: int | None) -> None:
        """How long such a step takes, also one that no request was in."""
        self._cost.observe(plan, seconds, experts)

    def wants_tokens(self, plan: StepPlan) -> bool:
        """Whether the next step is to be planned behind the tokens of the one in flight: drafts are checked there, or
        are expected to pay behind its tokens."""
        if self._core.drafter is None:
            return False
        return any(row.drafts for row in plan.rows) or drafts_follow(self._core, self._core.drafter, plan)

    # ---- adapters

    def waits_for(self, adapter: AdapterKey) -> bool:
        """Whether requests of the adapter are waiting."""
        return self._core.waiting.has(adapter)

    def slot_loads(self) -> list[SlotLoad]:
        """Loads decided since the last call. Requests of such an adapter wait for `slot_loaded` or `slot_failed`."""
        return self._core.slots.take_loads()

    def slot_loaded(self, slot: int) -> None:
        self._core.slots.loaded(slot)

    def slot_failed(self, slot: int, reason: str) -> list[Event]:
        """The adapter could not be loaded: those that wait for it end, refused if they never ran, else failed."""
        adapter = self._core.slots.failed(slot)
        events = [self.refuse(r.request_id, reason) for r in self._core.waiting.of_adapter(adapter)]
        return [event for event in events if event is not None]

    def retire_adapter(self, key: AdapterKey) -> None:
        """The adapter was replaced or unloaded: requests that have it go on, then its slot is given back."""
        self._core.slots.retire(key)

    def released_adapters(self) -> list[AdapterKey]:
        """Retired adapters that nothing refers to any more, since the last call."""
        return self._core.slots.take_released()

    # ---- state

    def has_work(self) -> bool:
        return bool(self._core.requests or self._core.flights)

    @property
    def num_waiting(self) -> int:
        return len(self._core.waiting)

    def request(self, request_id: str) -> Request | None:
        return self._core.requests.get(request_id)

    def requests(self) -> list[Request]:
        """All that have not ended, in order of arrival."""
        return list(self._core.requests.values())

    def stats(self) -> dict[str, float | int]:
        """For people and /metrics. `tenant_service/NAME`, of background work `background_service/NAME`, is weighted
        tokens."""
        core = self._core
        services = {
            f"background_service/{account[:-1]}" if is_background(account) else f"tenant_service/{account}": service
            for account, service in core.fairness.services().items()
        }
        free, cached = core.blocks.num_free, core.blocks.num_free_cached
        return {
            "running": len(core.running),
            "waiting": len(core.waiting),
            "steps_in_flight": len(core.flights),
            "steps": self._step,
            "blocks_total": core.blocks.num_blocks,
            "blocks_used": core.blocks.num_blocks - free,
            "blocks_free": free,
            "blocks_cached": cached,  # those of the free ones that can still be found
            "prefix_hit_tokens": core.num_hit_tokens,
            "prefix_lookup_tokens": core.num_looked_up_tokens,
            "preemptions": core.num_preemptions,
            "prefill_tokens": self._num_prefill_tokens,
            "decode_tokens": self._num_decode_tokens,
            "drafted_tokens": self._num_drafted_tokens,
            "accepted_tokens": self._num_accepted_tokens,
            "adapter_uses": core.slots.num_uses,
            "adapter_queries": core.slots.num_arrivals,
            "adapter_hits": core.slots.num_hits,
            "adapter_slot_loads": core.slots.num_loads,
            "adapter_wait_s": core.slots.waited_s,
            "slots_total": len(core.slots.slots),
            "slots_used": sum(slot.pins > 0 for slot in core.slots.slots),
            **services,
            **({} if core.states is None else _state_stats(core.states)),
            **(self.disk.stats() if self.disk is not None else {}),
        }

    @property
    def running(self) -> list[Request]:
        """Those that hold blocks, in the order in which they are served."""
        return [request for _, _, request in self._core.running]

    def check_integrity(self) -> None:
        """Raises IntegrityError with everything that is inconsistent."""
        self._core.check_integrity()

    # ---- inside

    def _check_length(self, request: Request) -> None:
        config, need = self.config, len(request.prompt) + min(1, request.sampling.max_tokens)
        if need > config.max_model_len:
            limit, what = config.max_model_len, "the model's length limit"
        elif need > config.max_tokens_held:
            limit, what = config.max_tokens_held, "what the KV cache holds"
        else:
            return
        raise AdmissionError(
            "too_long",
            f"This model's maximum context length is {limit} tokens ({what}). However, your prompt resulted in "
            f"{len(request.prompt)} tokens and leaves no room for output. Please reduce the length of the prompt.",
        )

    def _take_tokens(self, row: StepRow, tokens: list[int]) -> Event:
        request, output = row.request, row.request.output
        request.num_in_flight -= 1
        if row.drafts:
            accepted = len(tokens) - 1
            request.num_drafts -= len(row.drafts)
            self._num_drafted_tokens += len(row.drafts)
            self._num_accepted_tokens += accepted
            self._num_decode_tokens += accepted
        if len(output) + len(tokens) < request.most_output and request.ending.isdisjoint(tokens):
            output += tokens
        else:
            for i, token in enumerate(tokens):
                if token in request.ending:
                    return self._end(request, EventKind.FINISHED, "stop", tokens=tokens[:i], stop_token=token)
                output.append(token)
                if len(output) >= request.most_output:
                    return self._end(request, EventKind.FINISHED, "length", tokens=tokens[: i + 1])
        if request.status is _RUNNING:
            if row.drafts:
                self._core.accept(request, row, accepted)
            if request.num_computed // self._block_size > request.num_published:
                self._core.publish(request)
        return Event(_TOKENS, request, tokens)

    def _end_known(self, request_id: str, kind: EventKind, reason: str) -> Event | None:
        request = self._core.requests.get(request_id)
        return None if request is None else self._end(request, kind, reason)

    def _end(
        self,
        request: Request,
        kind: EventKind,
        reason: str,
        tokens: Sequence[int] = (),
        stop_token: int | None = None,
    ) -> Event:
        self._core.end(request, _STATUS[kind])
        request.stop_reason = reason
        return Event(kind, request, list(tokens), reason, stop_token=stop_token)

    def _flight(self, plan: StepPlan) -> Flight:
        for flight in self._core.flights:
            if flight.plan is plan:
                return flight
        raise IntegrityError(f"step {plan.step} is not in flight")


def _state_stats(states: StatePool) -> dict[str, int]:
    return {
        "states_total": states.num_states,
        "snapshots_total": states.num_snapshots,
        "snapshots_findable": states.num_findable,
        "snapshots_saved": states.num_saved,
        "snapshots_evicted": states.num_evicted,
    }


def _fits(row: StepRow, tokens: Sequence[int]) -> bool:
    """Whether these can be what came of the row: some of its drafts, and one token more."""
    if not row.drafts:
        return len(tokens) == row.samples
    if not row.samples:
        return not tokens
    accepted = len(tokens) - 1
    return 0 <= accepted <= len(row.drafts) and tuple(tokens[:accepted]) == row.drafts[:accepted]
