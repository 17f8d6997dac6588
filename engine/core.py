"""The engine's loop body: drain, schedule, launch, commit the step before. One screen of it is `step`."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from engine.errors import KtserveError, UserError
from engine.lora.registry import AdapterRegistry
from engine.messages import (
    Abort,
    Cancelled,
    Drain,
    Failed,
    Finished,
    FromEngine,
    GetStats,
    LoadAdapter,
    Refused,
    Reply,
    StopFound,
    Submit,
    ToEngine,
    TokenLogprobs,
    Tokens,
    UnloadAdapter,
)
from engine.profile import Profiler
from engine.runner import InFlight, ModelRunner
from scheduler.plan import AdmissionError, Event, EventKind, SlotLoad, StepPlan
from scheduler.request import BASE, AdapterKey, Request
from scheduler.scheduler import Scheduler


@dataclass
class _Live:
    """What the engine keeps of a request beside the scheduler's own."""

    request: Request
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position
    prompt_sent: bool = False


class EngineCore:
    """Single-threaded but for adapter files and slots, which load on threads of their own.

    `send` gets every message to the api, in order. `overlap`: step N+1 is launched before N is committed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        registry: AdapterRegistry,
        send: Callable[[FromEngine], None],
        *,
        overlap: bool = False,
        check_integrity: bool = False,
        profiler: Profiler | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.registry = registry
        self.overlap = overlap
        self.check_integrity = check_integrity
        self.profiler = profiler
        self._send = send
        self._live: dict[str, _Live] = {}
        self._in_flight: InFlight | None = None
        self._schedule_s = 0.0
        self._slot_loader = ThreadPoolExecutor(1, thread_name_prefix="adapter-slot")
        self._slot_loads: list[tuple[SlotLoad, Future[None]]] = []
        self._adapter_calls: dict[int, int] = {}  # load id -> call_id
        self._retired: set[AdapterKey] = set()  # the scheduler knows that these are to go
        self._drain: tuple[int, float] | None = None  # call_id, when to give up
        self._steps = 0
        self._failed_steps = 0

    # ---- messages

    def handle(self, message: ToEngine) -> None:
        """Take one message. Whatever is wrong with it is answered, never raised."""
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            self._end(self.scheduler.abort(message.request_id, "client"))
        elif isinstance(message, StopFound):
            self._end(self.scheduler.finish(message.request_id, message.num_tokens))
        elif isinstance(message, LoadAdapter):
            self._load_adapter(message)
        elif isinstance(message, UnloadAdapter):
            self._unload_adapter(message)
        elif isinstance(message, GetStats):
            self._send(Reply(call_id=message.call_id, ok=True, stats=self.stats()))
        elif isinstance(message, Drain):
            self._drain = (message.call_id, time.monotonic() + message.timeout_s)

    def _submit(self, m: Submit) -> None:
        def refuse(status: int, code: str, text: str, field: str | None, retry_after_s: float | None = None) -> None:
            self._send(
                Refused(
                    request_id=m.request_id,
                    status=status,
                    code=code,
                    message=text,
                    field=field,
                    retry_after_s=retry_after_s,
                )
            )

        if self._drain is not None:
            return refuse(503, "draining", "the server is shutting down and takes no new requests", None)
        vocabulary = self.runner.model.config.vocab_size
        wrong = [t for t in (*m.prompt, *m.sampling.logit_bias, *m.sampling.stop_token_ids) if not 0 <= t < vocabulary]
        if not m.prompt or wrong:
            text = f"token id {wrong[0]} is outside 0..{vocabulary - 1}" if wrong else "the prompt has no tokens"
            return refuse(400, "invalid_tokens", text, "prompt")
        now = time.monotonic()
        try:
            adapter = BASE if m.adapter is None else self.registry.resolve(m.adapter)
            deadline = None if m.timeout_s is None else now + m.timeout_s
            request = Request(m.request_id, m.prompt, m.sampling, adapter, m.tenant, m.priority, deadline)
            self.scheduler.add(request, now, m.tenant_weight)
        except UserError as error:
            return refuse(404, "unknown_adapter", str(error), "model")
        except AdmissionError as error:
            status = 429 if error.code == "queue_full" else 400
            return refuse(
                status, error.code, str(error), "prompt" if error.code == "too_long" else None, error.retry_after_s
            )
        self._live[m.request_id] = _Live(request)
        return None

    def _load_adapter(self, m: LoadAdapter) -> None:
        try:
            load_id = self.registry.load(m.name, m.path, replace=m.replace, expert_scaling=m.expert_scaling)
        except UserError as error:
            self._send(Reply(call_id=m.call_id, ok=False, error=str(error), field=error.field, status=400))
        else:
            self._adapter_calls[load_id] = m.call_id

    def _unload_adapter(self, m: UnloadAdapter) -> None:
        try:
            self.registry.unload(m.name)
        except UserError as error:
            self._send(Reply(call_id=m.call_id, ok=False, error=str(error), field=error.field, status=404))
        else:
            self._send(Reply(call_id=m.call_id, ok=True))

    # ---- steps

    def step(self) -> bool:
        """Schedule and launch a step, and commit the one before (or, without overlap, this very one).

        Returns whether there was anything to do; if not, requests can only wait for threads or messages.
        """
        now = time.monotonic()
        self._tend_adapters()
        self._emit(self.scheduler.expire(now), None)
        plan = self.scheduler.schedule(now)
        self._schedule_s = time.monotonic() - now
        for load in self.scheduler.slot_loads():
            self._slot_loads.append((load, self._slot_loader.submit(self._fill_slot, load)))
        before, self._in_flight = self._in_flight, None
        launched = self._launch(plan) if plan else None
        if before:
            self._commit(before)
        if launched and self._sample(launched):
            if self.overlap:
                self._in_flight = launched
            else:
                self._commit(launched)
        if self.check_integrity:
            self.scheduler.check_integrity()
        self._tend_drain()
        return plan is not None or before is not None

    @property
    def busy(self) -> bool:
        """Whether `step` should be called again at once."""
        return self._in_flight is not None or self.scheduler.has_work()

    @property
    def waiting_for_threads(self) -> bool:
        """Whether adapters are on their way, or requests wait although no step could be planned."""
        return bool(self._slot_loads or self._adapter_calls) or self.busy

    def close(self) -> None:
        """Cancel what is left and end the threads."""
        for request_id in list(self._live):
            self._end(self.scheduler.abort(request_id, "shutdown"))
        self._slot_loader.shutdown(wait=True)
        self.registry.close()
        self.runner.model.close()
        if self.profiler:
            self.profiler.close()

    def stats(self) -> dict[str, float | int]:
        return {
            **self.scheduler.stats(),
            "steps": self._steps,
            "failed_steps": self._failed_steps,
            "adapters_known": len(self.registry.infos()),
        }

    def _launch(self, plan: StepPlan) -> InFlight | None:
        try:
            return self.runner.launch_forward(plan)
        except Exception as error:  # noqa: BLE001 - whatever a step raises ends its requests, not the server
            self._fail(plan, error)
            return None

    def _sample(self, step: InFlight) -> bool:
        try:
            self.runner.launch_sample(step)
        except Exception as error:  # noqa: BLE001 - as in _launch
            self._fail(step.plan, error)
            return False
        return True

    def _commit(self, step: InFlight) -> None:
        try:
            tokens = self.runner.tokens(step)
        except Exception as error:  # noqa: BLE001 - as in _launch; on a GPU a kernel's fault surfaces here
            self._fail(step.plan, error)
            return
        now = time.monotonic()
        for request_id, logprobs in step.prompt_logprobs.items():
            if request_id in self._live:
                start = next(row.start for row in step.plan.rows if row.request.request_id == request_id)
                self._live[request_id].prompt_logprobs.update(enumerate(logprobs, start + 1))
        self._emit(self.scheduler.commit(step.plan, tokens, now), step)
        self._steps += 1
        seconds = now - step.launched_s
        touched = step.trace.experts_touched if step.trace else None
        self.scheduler.observe(step.plan, seconds, sum(touched) if touched else None)
        if self.profiler:
            self.profiler.step(step, seconds, self._schedule_s)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        self._failed_steps += 1
        if not isinstance(error, KtserveError):
            traceback.print_exception(error)
        reason = f"{type(error).__name__}: {error}"
        self._emit([replace(event, reason=reason) for event in self.scheduler.drop(plan)], None)

    # ---- events

    def _end(self, event: Event | None) -> None:
        if event is not None:
            self._emit([event], None)

    def _emit(self, events: list[Event], step: InFlight | None) -> None:
        for event in events:
            rid = event.request.request_id
            live = self._live[rid]
            if event.tokens or self._owes_prompt(live, event):
                self._send(self._tokens(live, event, step))
            if event.kind is EventKind.TOKENS:
                continue
            del self._live[rid]
            self._send(_terminal(event))

    def _owes_prompt(self, live: _Live, event: Event) -> bool:
        """A request whose very first token ended it still gets its prompt's log-probabilities."""
        asked = live.request.sampling.prompt_logprobs is not None
        return asked and not live.prompt_sent and event.kind is EventKind.FINISHED

    def _tokens(self, live: _Live, event: Event, step: InFlight | None) -> Tokens:
        request, prompt = live.request, None
        if request.sampling.prompt_logprobs is not None and not live.prompt_sent:
            live.prompt_sent = True
            prompt = [live.prompt_logprobs.get(i) for i in range(len(request.prompt))]
        logprobs = step.logprobs.get(request.request_id) if step else None
        if step and self.profiler:
            for i, token in enumerate(event.tokens, len(request.output) - len(event.tokens)):
                self.profiler.token(request.request_id, step.plan.step, i, token, request.adapter.uid)
        return Tokens(
            request_id=request.request_id,
            tokens=event.tokens,
            logprobs=[logprobs] if logprobs and event.tokens else None,
            prompt_logprobs=prompt,
            cached_tokens=request.num_cached,
        )

    # ---- adapters

    def _fill_slot(self, load: SlotLoad) -> None:
        self.runner.model.set_adapter(load.slot, self.registry.weights(load.adapter))

    def _tend_adapters(self) -> None:
        """Take in what the threads have finished."""
        for result in self.registry.poll():
            call_id = self._adapter_calls.pop(result.load_id)
            if result.info is not None:
                self._send(Reply(call_id=call_id, ok=True, adapter=result.info))
            else:
                status = 400 if isinstance(result.error, UserError) else 500
                self._send(Reply(call_id=call_id, ok=False, error=str(result.error), field="lora_path", status=status))
        for key in self.registry.retiring():  # replaced by a load or unloaded by a call
            if key not in self._retired:
                self._retired.add(key)
                self.scheduler.retire_adapter(key)
        for item in [item for item in self._slot_loads if item[1].done()]:
            self._slot_loads.remove(item)
            load, future = item
            error = future.exception()
            if error is None:
                self.scheduler.slot_loaded(load.slot)
            else:
                self._emit(self.scheduler.slot_failed(load.slot, f"the adapter could not be loaded: {error}"), None)
        for key in self.scheduler.released_adapters():
            self._retired.discard(key)
            self.registry.released(key)

    def _tend_drain(self) -> None:
        if self._drain is None:
            return
        call_id, give_up = self._drain
        if self._live and time.monotonic() > give_up:
            for request_id in list(self._live):
                self._end(self.scheduler.abort(request_id, "shutdown"))
        if not self._live and call_id >= 0:
            self._send(Reply(call_id=call_id, ok=True))
            self._drain = (-1, give_up)  # answered; new requests stay refused


def _terminal(event: Event) -> FromEngine:
    request = event.request
    rid = request.request_id
    if event.kind is EventKind.FINISHED:
        return Finished(
            request_id=rid,
            reason=event.reason,
            prompt_tokens=len(request.prompt),
            output_tokens=len(request.output),
            cached_tokens=request.num_cached,
            stop_token=event.stop_token,
        )
    if event.kind is EventKind.REFUSED:
        return Refused(
            request_id=rid, status=503, code="adapter_failed", message=event.reason, retry_after_s=event.retry_after_s
        )
    if event.kind is EventKind.CANCELLED:
        return Cancelled(request_id=rid, reason=event.reason)
    return Failed(request_id=rid, message=event.reason)
