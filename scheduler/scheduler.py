"""The scheduler's face: requests in, step plans out, tokens in, events out. Pure logic: no torch, no clock, no threads.

add -> [schedule -> StepPlan -> (engine launches) -> commit -> events] ... -> one terminal event a request
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.batch import Batch
from scheduler.config import SchedulerConfig
from scheduler.core import Core, Flight
from scheduler.cost import CostModel
from scheduler.errors import IntegrityError
from scheduler.pace import Pace
from scheduler.plan import AdmissionError, Event, EventKind, SlotLoad, StepPlan
from scheduler.request import BASE, AdapterKey, Request, Status

__all__ = ["AdmissionError", "IntegrityError", "Scheduler", "SchedulerConfig"]

_STATUS = {
    EventKind.FINISHED: Status.FINISHED,
    EventKind.REFUSED: Status.REFUSED,
    EventKind.CANCELLED: Status.CANCELLED,
    EventKind.FAILED: Status.FAILED,
}


class Scheduler:
    """Continuous batching over paged KV, adapter slots and fair tenants.

    Times are seconds of the caller's clock, which must not run backwards. Ended requests are forgotten: their last
    event is returned once, by whichever call ended them.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._core = Core(config)
        self._cost = CostModel(config.initial_chunk, config.min_chunk)
        self._pace = Pace()
        self._eos = frozenset(config.eos_token_ids)
        self._step = 0
        self._num_prefill_tokens = 0
        self._num_decode_tokens = 0

    # ---- requests

    def add(self, request: Request, now: float, tenant_weight: float = 1.0) -> None:
        """Take a request into the queue, or raise AdmissionError. A larger weight means a larger share of service."""
        core, config = self._core, self.config
        if request.request_id in core.requests:
            raise AdmissionError("duplicate", f"request {request.request_id!r} is under way already")
        if not request.prompt:
            raise AdmissionError("empty_prompt", "the prompt has no tokens, at least 1 is needed")
        if request.adapter != BASE and not config.num_adapter_slots:
            raise AdmissionError("no_adapter_slots", "this server has no adapter slots")
        self._check_length(request)
        if len(core.waiting) >= config.max_queue:
            raise AdmissionError(
                "queue_full",
                f"{len(core.waiting)} requests are waiting, the limit is {config.max_queue}",
                self._pace.retry_after_s(len(core.waiting)),
            )
        core.arrive(request, now, tenant_weight)

    def abort(self, request_id: str, reason: str) -> Event | None:
        """The request is in no plan from now on. None if it is unknown or has ended."""
        return self._end_known(request_id, EventKind.CANCELLED, reason)

    def fail(self, request_id: str, reason: str) -> Event | None:
        return self._end_known(request_id, EventKind.FAILED, reason)

    def refuse(self, request_id: str, reason: str) -> Event | None:
        """For a request that waits for something that will not come. One that ran before fails instead."""
        request = self._core.requests.get(request_id)
        never_ran = request is None or request.status is Status.WAITING
        return self._end_known(request_id, EventKind.REFUSED if never_ran else EventKind.FAILED, reason)

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
        late = [r for r in self._core.requests.values() if r.deadline is not None and r.deadline <= now]
        return [self._end(request, EventKind.CANCELLED, "timeout") for request in late]

    # ---- steps

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step; None if nothing can run now. The step counts as launched until `commit` or `drop`.

        At most two steps are under way: raises IntegrityError when a third is asked for.
        """
        flight = Batch(self._core, self._cost).build(self._step, now)
        if flight is None:
            return None
        self._step += 1
        decodes = sum(row.is_decode for row in flight.plan.rows)
        self._num_decode_tokens += decodes
        self._num_prefill_tokens += flight.plan.num_tokens - decodes
        return flight.plan

    def commit(self, plan: StepPlan, tokens: Sequence[Sequence[int]], now: float) -> list[Event]:
        """Take a step's tokens: `tokens[i]` is row i's one token, or empty if the row does not sample.

        Steps are committed in order. Rows of requests that have ended since are ignored. An end-of-sequence or stop
        token ends its request as "stop" and is not part of the output; the token that reaches max_tokens or the
        length limit is.
        """
        core = self._core
        if not core.flights or core.flights[0].plan is not plan:
            raise IntegrityError(f"step {plan.step} is not the oldest step in flight")
        flight = core.flights[0]
        if len(tokens) != len(plan.rows):
            raise IntegrityError(f"step {plan.step}: tokens for {len(tokens)} rows, it has {len(plan.rows)}")
        wrong = [
            row.request.request_id
            for row, new in zip(plan.rows, tokens, strict=True)
            if row.request not in flight.void and len(new) != row.samples
        ]
        if wrong:
            raise IntegrityError(f"step {plan.step}: not one token per sampling row for requests {wrong}")
        del core.flights[0]
        events = []
        for row, new in zip(plan.rows, tokens, strict=True):
            request = row.request
            if request not in flight.void:
                if row.samples:
                    request.num_in_flight -= 1
                    events.append(self._take_token(request, new[0]))
                elif row.start + row.num_tokens == request.num_tokens and not request.sampling.max_tokens:
                    events.append(self._end(request, EventKind.FINISHED, "length"))
        core.land(flight)
        self._pace.ended(sum(event.kind is EventKind.FINISHED for event in events), now)
        return events

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
        if self._core.config.itl_target_s is not None:  # nobody else asks what a step will take
            self._cost.observe(plan, seconds, experts)

    # ---- adapters

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
    def num_running(self) -> int:
        return len(self._core.running)

    @property
    def num_waiting(self) -> int:
        return len(self._core.waiting)

    def request(self, request_id: str) -> Request | None:
        return self._core.requests.get(request_id)

    def requests(self) -> list[Request]:
        """All that have not ended, in order of arrival."""
        return list(self._core.requests.values())

    def stats(self) -> dict[str, float | int]:
        """For people and /metrics. `tenant_service/NAME` is weighted tokens."""
        core = self._core
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
            "slots_total": len(core.slots.slots),
            "slots_used": sum(slot.pins > 0 for slot in core.slots.slots),
            **{f"tenant_service/{name}": service for name, service in core.fairness.services().items()},
        }

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
            f"the prompt has {len(request.prompt)} tokens and leaves no room for output: prompt and output together "
            f"can have {limit} tokens ({what})",
        )

    def _take_token(self, request: Request, token: int) -> Event:
        sampling = request.sampling
        if token in sampling.stop_token_ids or (token in self._eos and not sampling.ignore_eos):
            return self._end(request, EventKind.FINISHED, "stop", stop_token=token)
        request.output.append(token)
        total = len(request.prompt) + len(request.output)
        if len(request.output) >= sampling.max_tokens or total >= self.config.max_tokens_held:
            return self._end(request, EventKind.FINISHED, "length", tokens=[token])
        if request.status is Status.RUNNING:
            self._core.publish(request)
        return Event(EventKind.TOKENS, request, [token])

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
