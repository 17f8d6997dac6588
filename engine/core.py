"""The engine's loop body: drain, schedule, launch, commit the step before. One screen of it is `step`."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from engine.diagnostics.live import TouchedTotals, engine_stats, live
from engine.diagnostics.profile import StepObserver
from engine.errors import KtserveError, UserError
from engine.grammar.grammars import CompileFailed, Grammars
from engine.grammar.masks import TokenMask, masks_of
from engine.kv_disk.disk import KvDisk
from engine.lora.adapters import Adapters
from engine.lora.version import Loaded, LoadFailed, Moved, Retiring, SlotFailed, SlotFilled
from engine.messages import (
    Abort,
    AdapterMoved,
    Drain,
    Failed,
    FromEngine,
    GetLive,
    GetStats,
    LoadAdapter,
    Refused,
    Reply,
    SetVocabulary,
    StopFound,
    Submit,
    ToEngine,
    Tokens,
    Tune,
    UnloadAdapter,
)
from engine.steps.admission import RefusalError, admit
from engine.steps.answers import Answer, terminal
from engine.steps.base import Launched, PromptRunner, Runner, Tuner
from scheduler.plan import Event, EventKind, StepPlan
from scheduler.scheduler import Scheduler

log = logging.getLogger("ktserve")
_LOOK_S = 0.0005  # how often the lane of long prompts is looked after while a step of the others is awaited
_TRAINING_S = 0.01  # at a time while nothing else is there; messages are looked for in between


class EngineCore:
    """Single-threaded but for adapter files and slots and blocks on disk, which threads of their own read and write.

    `send` gets every message to the api, in order. `overlap`: step N+1 is launched before N is committed, unless
    drafts are to follow N's tokens.
    `read_bandwidth`: of the memory that experts lie in, in bytes a second, if it was measured. `expected`: tokens a
    second by name, for /metrics. `training_share`: of the time that the `tuner` may take while live requests run.
    `prompts`: runs the steps of the scheduler's lane of long prompts, beside those of `runner`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner[Any],
        adapters: Adapters,
        send: Callable[[FromEngine], None],
        *,
        overlap: bool = False,
        check_integrity: bool = False,
        profiler: StepObserver | None = None,
        read_bandwidth: float | None = None,
        expected: Mapping[str, float] | None = None,
        disk: KvDisk | None = None,
        training_share: float = 0.0,
        prompts: PromptRunner | None = None,
    ) -> None:
        self.tuner: Tuner | None = None
        self.training_share = training_share
        self._training_credit_s = 0.0
        self.scheduler = scheduler
        self.runner = runner
        self.adapters = adapters
        self.overlap = overlap
        self.check_integrity = check_integrity
        self.profiler = profiler
        self.read_bandwidth = read_bandwidth
        self.expected = expected or {}
        self.disk = disk
        self.prompts = prompts
        self._send = send
        self._live: dict[str, Answer] = {}
        self._masks: dict[str, list[TokenMask]] = {}  # of live requests that have some
        self._grammars = Grammars(runner.model.config.vocab_size, scheduler.config.eos_token_ids)
        self._in_flight: Launched | None = None
        self._schedule_s = 0.0
        self._ended_s = 0.0  # when the last step that is not of the lane of long prompts was seen to have ended
        self._drain: tuple[int, float] | None = None  # call_id, when to give up
        self._steps = 0
        self._failed_steps = 0
        self._touched = TouchedTotals()

    # ---- messages

    def handle(self, message: ToEngine) -> None:
        """Take one message. Whatever is wrong with it is answered, never raised."""
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, SetVocabulary):
            self._grammars.set_vocabulary(message)
        elif isinstance(message, Abort):
            self._end(self.scheduler.abort(message.request_id, "client"))
        elif isinstance(message, StopFound):
            self._end(self.scheduler.finish(message.request_id, message.num_tokens))
        elif isinstance(message, LoadAdapter):
            self._load_adapter(message)
        elif isinstance(message, UnloadAdapter):
            self._unload_adapter(message)
        elif isinstance(message, Tune):
            self._tune(message)
        elif isinstance(message, GetStats):
            self._send(Reply(call_id=message.call_id, ok=True, stats=self.stats()))
        elif isinstance(message, GetLive):
            seen = live(self.scheduler, self.adapters, self.runner.model, self.read_bandwidth, self._touched)
            self._send(Reply(call_id=message.call_id, ok=True, live=seen))
        elif isinstance(message, Drain):
            self._drain = (message.call_id, time.monotonic() + message.timeout_s)

    def _submit(self, m: Submit) -> None:
        vocabulary = self.runner.model.config.vocab_size
        try:
            if self._drain is not None:
                raise RefusalError(m, 503, "draining", "the server is shutting down and takes no new requests", None)
            request, evicted = admit(m, self.scheduler, self.adapters, self._grammars, vocabulary, time.monotonic())
        except RefusalError as refusal:
            return self._send(refusal.answer)
        if self.disk is not None:
            request.kv_digest = self.disk.digest(self.adapters.digest(request.adapter))
        self._live[m.request_id] = Answer(request)
        masks = masks_of(m.sampling, self.scheduler.config.eos_token_ids, vocabulary)
        if m.grammar is not None:
            mask, compiled = self._grammars.open(m.request_id, m.grammar)
            masks.append(mask)
            request.held = not compiled
        if masks:
            self._masks[m.request_id] = masks
        self._end(evicted)
        return None

    def _load_adapter(self, m: LoadAdapter) -> None:
        try:
            self.adapters.load(m.call_id, m.name, m.path, m.replace, m.expert_scaling, m.pinned, m.expert_b_layout)
        except UserError as error:
            self._refuse_call(m.call_id, 400, error)

    def _unload_adapter(self, m: UnloadAdapter) -> None:
        try:
            self.adapters.unload(m.name)
        except UserError as error:
            self._refuse_call(m.call_id, 404, error)
        else:
            self._send(Reply(call_id=m.call_id, ok=True))

    def _tune(self, m: Tune) -> None:
        if self.tuner is None:
            self._refuse_call(m.call_id, 400, UserError("training is off: start with --fine-tuning", "fine_tuning"))
        else:
            self.tuner.handle(m)

    def _refuse_call(self, call_id: int, status: int, error: KtserveError) -> None:
        field = error.field if isinstance(error, UserError) else None
        self._send(Reply(call_id=call_id, ok=False, error=str(error), field=field, status=status))

    # ---- steps

    def step(self) -> bool:
        """Schedule and launch a step, and commit the one before (or, without overlap, this very one).

        Returns whether there was anything to do; if not, requests can only wait for threads or messages.
        """
        now = time.monotonic()
        self._take_adapter_events()
        self._take_grammar_events()
        if self.disk is not None:
            self.disk.take()
        self._emit(self.scheduler.expire(now), None)
        worked = self._tend_prompts()
        before, self._in_flight = self._in_flight, None
        waited = False
        if before and self.scheduler.wants_tokens(before.plan):
            self._await(before)
            self._commit(before)
            before, waited, now = None, True, time.monotonic()
        plan = self.scheduler.schedule(now)
        self._schedule_s = time.monotonic() - now
        for load in self.scheduler.slot_loads():
            self.adapters.fill(load)
        if self.disk is not None:
            self.disk.start()
        launched = self._launch(plan) if plan else None
        if launched and waited:
            launched.launched_s = self._ended_s  # what lies between is the price of waiting
        if before:
            self._await(before)
            self._commit(before)
        if launched and self._sample(launched):
            if self.overlap:
                self._in_flight = launched
            else:
                self._await(launched)
                self._commit(launched)
        if self.check_integrity:
            self.scheduler.check_integrity()
            self.adapters.check_integrity()
        self._tend_drain()
        trained = self._train(plan, time.monotonic() - now)
        return plan is not None or before is not None or waited or trained or worked

    def _tend_prompts(self) -> bool:
        """Commit the step of long prompts that has ended, and launch the next; whether there was any."""
        if self.prompts is None:
            return False
        ended = None
        if (plan := self.prompts.plan) is not None:
            try:
                ended = self.prompts.take(self._masks)
            except Exception as error:  # noqa: BLE001 - as in _launch
                self._fail(plan, error)
            else:
                if ended is None:
                    return False
                self._take_tokens(*ended)
        begun = self.scheduler.schedule_prompts(time.monotonic())
        if begun is not None:
            self._grammars.prefetch(begun)
            try:
                self.prompts.launch(begun, self._masks)
            except Exception as error:  # noqa: BLE001 - as in _launch
                self._fail(begun, error)
        return plan is not None or begun is not None

    def _await(self, step: Launched) -> None:
        """Until it has ended, look after the lane of long prompts, if a step of it is in flight."""
        while self.prompts is not None and self.prompts.plan is not None and not self.runner.ended(step):
            self._tend_prompts()
            time.sleep(_LOOK_S)

    def _train(self, plan: StepPlan | None, step_s: float) -> bool:
        """Pieces of training behind a step that took `step_s`: `training_share` of the time while live requests run;
        as long as the step beside background requests alone."""
        if self.tuner is None or not self.tuner.ready:
            return False
        if plan is None or all(row.request.background for row in plan.rows):
            self.tuner.advance(_TRAINING_S if plan is None else step_s)
            return True
        share = self.training_share
        self._training_credit_s += step_s * share / (1 - share)
        if self._training_credit_s <= 0:
            return False
        self._training_credit_s -= self.tuner.advance(self._training_credit_s)
        return True

    @property
    def busy(self) -> bool:
        """Whether `step` should be called again at once."""
        return self._in_flight is not None or self.scheduler.has_work() or self.training

    @property
    def training(self) -> bool:
        """Whether there is something to train now."""
        return self.tuner is not None and self.tuner.ready

    @property
    def waiting_for_threads(self) -> bool:
        """Whether adapters, grammars or blocks on disk are on their way, or requests wait although no step could be
        planned."""
        on_disk = self.disk is not None and self.disk.busy
        tuning = self.tuner is not None and self.tuner.busy
        return self.adapters.busy or self._grammars.busy or on_disk or tuning or self.busy

    def close(self) -> None:
        """Cancel what is left and end the threads."""
        for request_id in list(self._live):
            self._end(self.scheduler.abort(request_id, "shutdown"))
        if self.disk is not None:
            self.disk.close()
        if self.tuner is not None:
            self.tuner.close()
        self.adapters.close()
        self._grammars.close()
        if self.prompts is not None:
            self.prompts.close()
        self.runner.close()
        if self.profiler:
            self.profiler.close()

    def stats(self) -> dict[str, Any]:
        return {
            **engine_stats(self.scheduler, self.adapters, self.runner.model, self.read_bandwidth),
            **{f"expected_tokens_s/{name}": rate for name, rate in self.expected.items()},
            "steps": self._steps,
            "failed_steps": self._failed_steps,
            "experts_touched": self._touched.experts,
            "expert_layers": self._touched.layers,
            **(self.disk.stats() if self.disk is not None else {}),
            **(self.tuner.stats() if self.tuner is not None else {}),
        }

    def _launch(self, plan: StepPlan) -> Launched | None:
        self._grammars.prefetch(plan)
        try:
            launched: Launched = self.runner.launch_forward(plan, self._masks)
            return launched
        except Exception as error:  # noqa: BLE001 - whatever a step raises ends its requests, not the server
            self._fail(plan, error)
            return None

    def _sample(self, step: Launched) -> bool:
        self._grammars.prefetch(step.plan)
        try:
            self.runner.launch_sample(step, self._masks)
        except Exception as error:  # noqa: BLE001 - as in _launch
            self._fail(step.plan, error)
            return False
        return True

    def _commit(self, step: Launched) -> None:
        try:
            tokens = self.runner.tokens(step)
        except Exception as error:  # noqa: BLE001 - as in _launch; on a GPU a kernel's fault surfaces here
            self._fail(step.plan, error)
        else:
            self._take_tokens(step, tokens)

    def _take_tokens(self, step: Launched, tokens: list[list[int]]) -> None:
        now = time.monotonic()
        for request_id, logprobs in step.prompt_logprobs.items():
            if request_id in self._live:
                start = next(row.start for row in step.plan.rows if row.request.request_id == request_id)
                self._live[request_id].prompt_logprobs.update(enumerate(logprobs, start + 1))
        for request_id, fault in step.failed.items():
            self._fail_request(request_id, fault)
        self._emit(self.scheduler.commit(step.plan, tokens, now), step)
        self.scheduler.take_proposals(step.proposals)
        self._steps += 1
        # launched behind another one, it began when that one ended
        seconds = now - (step.launched_s if step.plan.prompts else max(step.launched_s, self._ended_s))
        if not step.plan.prompts:
            self._ended_s = now
        self.scheduler.observe(step.plan, seconds, self._touched.add(step.experts_touched))
        if self.profiler:
            self.profiler.step(step, seconds, self._schedule_s)

    def _fail_request(self, request_id: str, error: Exception) -> None:
        """What went wrong in a row ends its request; the others of the step go on."""
        if isinstance(error, UserError):
            if self.scheduler.fail(request_id, str(error)) is not None:
                self._forget(request_id)
                self._send(Failed(request_id=request_id, message=str(error), status=400))
            return
        event = self.scheduler.fail(request_id, f"{type(error).__name__}: {error}", spoiled=True)
        if event is not None:
            log.error(
                "request %s failed: %s", request_id, error, exc_info=None if isinstance(error, KtserveError) else error
            )
            self._emit([event], None)

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

    def _emit(self, events: list[Event], step: Launched | None) -> None:
        live, send, tokens = self._live, self._send, EventKind.TOKENS
        for event in events:
            rid = event.request.request_id
            answer = live[rid]
            if event.tokens or (answer.prompt_logprobs_due and event.kind is EventKind.FINISHED):
                send(Tokens(request_id=rid, tokens=event.tokens) if answer.plain else answer.tokens(event, step))
                if self.profiler and step:
                    self.profiler.tokens(event, step.plan.step)
            if event.kind is not tokens:
                self._forget(rid)
                send(terminal(event, step))

    def _forget(self, request_id: str) -> None:
        del self._live[request_id]
        self._masks.pop(request_id, None)
        self._grammars.close_request(request_id)

    # ---- adapters

    def _take_adapter_events(self) -> None:
        """Forward what happened to adapters: to the api and to the scheduler, and from the scheduler back."""
        for event in self.adapters.events():
            match event:
                case Loaded(call_id, info):
                    self._send(Reply(call_id=call_id, ok=True, adapter=info))
                case LoadFailed(call_id, error):
                    self._refuse_call(call_id, 400 if isinstance(error, UserError) else 500, error)
                case Moved(name, residency):
                    self._send(AdapterMoved(name=name, residency=residency.value))
                case Retiring(key):
                    self.scheduler.retire_adapter(key)
                case SlotFilled(slot):
                    self.scheduler.slot_loaded(slot)
                case SlotFailed(slot, reason):
                    self._emit(self.scheduler.slot_failed(slot, reason), None)
        for key in self.scheduler.released_adapters():
            self.adapters.release(key)

    # ---- grammars

    def _take_grammar_events(self) -> None:
        """Requests whose grammar has been compiled may run; those whose grammar could not be are refused."""
        for event in self._grammars.events():
            if not isinstance(event, CompileFailed):
                self.scheduler.release(event.request_id)
            elif self.scheduler.refuse(event.request_id, str(event.error)) is not None:
                self._forget(event.request_id)
                status = 400 if isinstance(event.error, UserError) else 500
                self._send(
                    Refused(
                        request_id=event.request_id,
                        status=status,
                        code="invalid_grammar",
                        message=str(event.error),
                        field=event.error.field if isinstance(event.error, UserError) else None,
                    )
                )

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
