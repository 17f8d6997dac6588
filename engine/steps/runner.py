"""Runs a step plan: fills the inputs, runs the model, samples.

launch_forward(plan, masks) -> InFlight     launch_sample(step, masks)     tokens(step) -> the new ones of each row

On a GPU the first two only launch: on a stream of the runner's own, without waiting for it. `tokens` waits for its
step alone, not for what was launched after it.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from engine.device import Arrival, to_device, to_host
from engine.errors import EngineError
from engine.grammar.masks import NO_MASKS, Masks, TokenBitmask, allowed_words
from engine.memory.idle import IdleMemory
from engine.model.causal_lm import CausalLM
from engine.model.native_executor import choose_executor
from engine.model.step import OutputKind, StepInput, Trace
from engine.ops.greedy import NOT_FINITE
from engine.steps.base import Launched
from engine.steps.graphs.padded import PaddedDecode
from engine.steps.inputs import StepArrays, TokenCounts
from engine.steps.orders import Step, StepLeader
from engine.steps.prompt_logprobs import prompt_logprobs, prompt_parts, wants_prompt
from engine.steps.proposals import Proposals
from engine.steps.sampling import PendingLogprobs, SampleRow, sample
from engine.steps.touched import TouchedCounter
from scheduler.plan import Idle, StepPlan, StepRow
from scheduler.request import Request

if TYPE_CHECKING:
    from native import _native

_NONE: NDArray[np.int64] = np.zeros(0, np.int64)


@dataclass
class InFlight(Launched):
    """A launched step. Its K kept tokens are those after which something is sampled, the rows' one after the other."""

    arrays: StepArrays = field(kw_only=True)
    hidden: torch.Tensor | None = None  # [T, H] if all of it is wanted, else [K, H]; None: it is not kept
    logits: torch.Tensor | None = None  # [>= K, V], where `greedy` does not do without
    greedy: torch.Tensor | None = None  # int64 [K] already, if all of them are greedy
    tokens: torch.Tensor | None = None  # int64 [K] on the host, valid once `arrival` has come
    arrival: Arrival | None = None
    touched: list[list[int] | torch.Tensor] = field(default_factory=list)  # of a TouchedCounter, valid likewise
    pending: PendingLogprobs | None = None
    pending_prompts: list[tuple[str, list[PendingLogprobs]]] = field(default_factory=list)
    errors: dict[int, Exception] = field(default_factory=dict)  # by kept token: why nothing was sampled after it

    @property
    def samples(self) -> list[tuple[StepRow, int]]:
        """Of each kept token its row, and how many drafts of the row are up to it."""
        return [(row, drafts) for row in self.plan.rows for drafts in range(row.num_samples)]


class ModelRunner:
    """What it needs of a request is in the plan; all it keeps is counts. `max_rows` requests at most are in a step.
    `urgent`: its kernels go before those of other streams."""

    def __init__(
        self,
        model: CausalLM,
        device: torch.device,
        seed: int,
        tracing: bool = False,
        pool: _native.WorkerPool | None = None,
        *,
        max_rows: int,
        urgent: bool = False,
    ) -> None:
        self.model = model
        self.pool = pool
        self.device = device
        self.seed = seed
        self.tracing = tracing
        self.executor = choose_executor(model)
        self._touched = TouchedCounter(model)
        self.padded: PaddedDecode | None = None
        self.leader: StepLeader | None = None  # of other ranks, which run the same steps
        self.idle_memory: IdleMemory | None = None  # where blocks and snapshots of states share memory
        self.proposals: Proposals | None = None  # of draft tokens, by a layer of the model
        self.keep_all = False  # hidden states of every token, to compare logits of whole prompts
        self.notes: list[str] = []  # logged at start: how steps run
        self.spare_cpus: list[int] = []  # where the engine's own thread belongs beside a pinned pool of threads
        self.sampled = torch.zeros(max_rows, dtype=torch.int64, device=device)  # of the last step that sampled
        self._places: dict[str, int] = {}  # by request id, in `sampled`
        self._counts: WeakKeyDictionary[Request, TokenCounts] = WeakKeyDictionary()  # where penalties need them
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the weights were loaded on another stream
            self._stream = torch.cuda.Stream(device, priority=-1 if urgent else 0)  # type: ignore[no-untyped-call]

    def pad_decode(self, max_rows: int, adapter_slots: int, scratch_block: int) -> PaddedDecode:
        """Run decode steps in padded sizes from now on; `capture` of what is returned, in `computing`, makes graphs."""
        self.padded = PaddedDecode(
            self.model, self.executor, max_rows, adapter_slots, scratch_block, self.sampled, self.tracing,
            keep_hidden=self.proposals is not None,
        )  # fmt: skip
        return self.padded

    @contextmanager
    def computing(self) -> Iterator[None]:
        """No gradients, the runner's stream, the CPU pool's workers spinning."""
        if self.pool is not None:
            self.pool.begin_step()
        try:
            with self._launching():
                yield
        finally:
            if self.pool is not None:
                self.pool.end_step()

    @contextmanager
    def _launching(self) -> Iterator[None]:
        """No gradients, the runner's stream."""
        with torch.inference_mode(), torch.cuda.stream(self._stream) if self._stream else nullcontext():
            yield

    def launch_forward(self, plan: StepPlan, masks: Masks = NO_MASKS) -> InFlight:
        """`masks` of the requests that have some: which tokens they allow is asked when the step is sampled."""
        return self.launch(plan, masks, None, None)

    def launch(self, plan: StepPlan, masks: Masks, arrays: StepArrays | None, after: Arrival | None) -> InFlight:
        """`arrays`: of the plan, where requests may change meanwhile. `after`: what the step is computed behind."""
        launched_s = time.monotonic()
        self.release(plan.idle)
        padded = self.padded if self.padded and self.padded.takes(plan) else None
        with self.computing():
            if after is not None:
                after.hold_stream()
            slots = {row.adapter_slot for row in plan.rows} - {0}
            self.model.begin_step(plan.num_tokens, lora=bool(slots), eager=padded is None, slots=slots)
            self._touched.begin()
            try:
                step = self._launch(plan, padded, masks, arrays)
            except Exception as error:
                if self.leader is not None:
                    self.leader.lost(error)
                self.model.check()  # says why, if an expert backend knows
                raise
            step.touched = self._touched.end()
        step.launched_s = launched_s
        return step

    def arrival(self) -> Arrival:
        """The point up to which steps have been launched."""
        with self._launching():
            return Arrival(self.device)

    def ended(self, step: InFlight) -> bool:
        """Whether `tokens` would not wait."""
        return step.arrival is None or step.arrival.here

    def settle(self) -> None:
        """Wait until nothing of what was launched is computed any more."""
        if self._stream is not None:
            self._stream.synchronize()

    def release(self, idle: Idle | None) -> None:
        """Before a step: memory that blocks and snapshots leave to each other goes back to the system."""
        if idle is not None and self.idle_memory is not None:
            self.idle_memory.release(idle)

    def launch_sample(self, step: InFlight, masks: Masks = NO_MASKS) -> None:
        """Sample every row that samples; also what was asked of log-probabilities. The logits are there already, so the
        CPU pool's workers stay asleep (but for a prompt's log-probabilities, which wake them)."""
        began = time.perf_counter()
        done = step.greedy is not None and self._stream is None  # torch's code is not touched then: caches are cold
        with nullcontext() if done else self._launching():
            try:
                self._sample(step, masks)
            except Exception as error:
                if self.leader is not None:
                    self.leader.lost(error)
                self.model.check()
                raise
        step.phases["sample_s"] = time.perf_counter() - began

    def tokens(self, step: InFlight) -> list[list[int]]:
        """Waits for the step. One list per row of the plan: the drafts that were sampled, from the first on, and the
        token after them; empty for a row that samples nothing or is among `step.failed`. Raises what failed in it."""
        found = self._tokens(step)
        if self.proposals is not None and step.hidden is not None:
            began = time.perf_counter()
            with self.computing():
                proposed = self.proposals.propose(step.plan, step.arrays, step.hidden, found, set(step.failed))
            step.proposals, step.phases["propose_s"] = proposed, time.perf_counter() - began
        return found

    def _tokens(self, step: InFlight) -> list[list[int]]:
        if step.arrival is not None:
            self.model.group.results(step.arrival.wait)
        self.model.check()
        step.experts_touched = self._touched.by_layer(step.touched)
        if step.pending is not None:
            for (row, _), logprobs in zip(step.samples, step.pending.read(), strict=True):
                if logprobs is not None:
                    step.logprobs.setdefault(row.request.request_id, []).append(logprobs)
        for request_id, parts in step.pending_prompts:
            step.prompt_logprobs[request_id] = [x for part in parts for x in part.read() if x is not None]
        sampled: list[int] = [] if step.tokens is None else step.tokens.tolist()
        if step.arrays.one_each and not step.errors and NOT_FINITE not in sampled:
            return [[token] for token in sampled]
        kept = pairwise(step.arrays.kept_starts.tolist())
        return [_accepted(step, row, sampled[a:b], a) for row, (a, b) in zip(step.plan.rows, kept, strict=True)]

    def close(self) -> None:
        """No step follows. Graphs go before what they have captured."""
        self.padded = None
        self.model.close()

    def _launch(self, plan: StepPlan, padded: PaddedDecode | None, masks: Masks, arrays: StepArrays | None) -> InFlight:
        began = time.perf_counter()
        arrays = arrays or StepArrays.of(plan, self._places)
        step = InFlight(plan, arrays=arrays)
        greedy = all(row.request.greedy for row in plan.rows if row.samples)
        greedy = greedy and not (masks and any(_masks(masks, row, i) for row, i in step.samples))
        every = self.keep_all or any(wants_prompt(row) for row in plan.rows)
        every = every or (self.proposals is not None and len(arrays.kept) < arrays.num_tokens)
        every = every and padded is None
        if self.leader is not None:
            parts = [part for i, row in enumerate(plan.rows) for part in prompt_parts(arrays, i, row)]
            self.leader.announce(
                Step.of(arrays, padded=bool(padded), every=every, greedy=greedy, logits=parts, idle=plan.idle)
            )
        if padded:
            built = time.perf_counter()
            step.trace = padded.launch(arrays)
            step.hidden = None if padded.hidden is None else padded.hidden[: arrays.num_tokens]
            if greedy:
                step.greedy = padded.greedy[: len(arrays.kept)]
            else:
                step.logits = self.model.head.whole(padded.logits[: len(arrays.kept)])
        else:
            given = self.step_input(arrays, every=every, greedy=greedy)
            built = time.perf_counter()
            self.model.plan(given.batch)
            out = self.executor.forward(given)
            step.hidden, step.logits, step.greedy, step.trace = out.hidden, out.logits, out.greedy, given.trace
            if given.output_kind is OutputKind.HIDDEN and len(arrays.kept):  # all of the prompt's are wanted too
                step.logits = self.model.logits(out.hidden[to_device(arrays.kept, torch.int64, self.device)])
        step.phases = {"prepare_s": built - began, "forward_s": time.perf_counter() - built}
        return step

    def step_input(self, arrays: StepArrays, *, every: bool, greedy: bool) -> StepInput:
        """Of a step that is not padded. `every`: the hidden states of all tokens are wanted."""
        keep, output_kind = arrays.kept, OutputKind.HIDDEN
        if len(keep) == 0:
            keep = np.zeros(1, np.int64)  # any one: the step is run for its keys and values
        elif not every:
            output_kind = OutputKind.GREEDY if greedy else OutputKind.LOGITS
        return StepInput(
            ids=arrays.token_ids(self.sampled),
            batch=arrays.layout(self.device),
            lora=arrays.lora(self.device),
            keep=None if every or len(keep) == arrays.num_tokens else to_device(keep, torch.int64, self.device),
            output_kind=output_kind,
            trace=Trace() if self.tracing else None,
        )

    def _sample(self, step: InFlight, masks: Masks) -> None:
        if len(step.arrays.kept):
            tokens = step.greedy
            if tokens is None:
                samples = step.samples
                if step.logits is None:
                    raise RuntimeError("a step that samples has tokens or logits")
                rows = []
                for i, (row, drafts) in enumerate(samples):
                    rows.append(self._sample_row(row, drafts))
                    try:
                        rows[-1].words = self._allowed(row, drafts, masks)
                    except Exception as error:  # noqa: BLE001 - a mask ends its own request with the error, no other
                        step.errors[i] = error
                out = sample(step.logits[: len(samples)].float(), rows)
                step.errors = out.errors | step.errors
                top = [row.request.sampling.logprobs for row, _ in samples]
                tokens, step.pending = out.tokens, PendingLogprobs(out.logits, out.tokens, top)
            step.tokens = self._deliver(step, tokens)
        sampling = [row.request.request_id for row in step.plan.rows if row.samples]
        self._places = dict(zip(sampling, range(len(sampling)), strict=True))
        for i, row in enumerate(() if step.arrays.single else step.plan.rows):  # a single token is the prompt's last
            if parts := prompt_parts(step.arrays, i, row):
                if step.hidden is None:
                    raise RuntimeError("a step that reads a prompt has hidden states")
                found = prompt_logprobs(self.model, step.hidden, row, parts)
                step.pending_prompts.append((row.request.request_id, found))
        step.arrival = Arrival(self.device)

    def _deliver(self, step: InFlight, tokens: torch.Tensor) -> torch.Tensor:
        """Put each row's last one into `sampled`, for the next step; returns all on the host, valid once the step's
        arrival has come. Padded steps read and write `sampled` where it is, so there it is copied from and to."""
        last = tokens
        if not step.arrays.one_each:
            last = tokens[to_device(step.arrays.last_kept, torch.int64, self.device)]
        if self.padded is None:
            self.sampled = last
            return to_host(tokens)
        if last.data_ptr() != self.padded.greedy.data_ptr():  # a padded step itself has put them there
            self.sampled[: len(last)].copy_(last.clamp(min=0))
        return tokens.clone() if self.device.type == "cpu" else to_host(tokens)

    def _allowed(self, row: StepRow, drafts: int, masks: Masks) -> TokenBitmask | None:
        """The tokens that may follow the row's last one and its first `drafts` drafts; None: all."""
        if not _masks(masks, row, drafts):
            return None
        output = [*row.request.output, *row.drafts[:drafts]]
        return allowed_words(masks[row.request.request_id], output, self.model.config.vocab_size)

    def _sample_row(self, row: StepRow, drafts: int) -> SampleRow:
        """The request's tokens after the row's last one, its first `drafts` drafts included."""
        request = row.request
        p = request.sampling
        seen = counts = _NONE
        if p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0:
            known = self._counts.get(request) or self._counts.setdefault(request, TokenCounts(request.prompt))
            known.update(request.output)
            seen, counts = known.seen(row.drafts[:drafts])
        return SampleRow(
            params=p,
            seed=self.seed ^ zlib.crc32(request.request_id.encode()) if p.seed is None else p.seed,
            position=row.start + row.num_tokens - len(row.drafts) + drafts,
            seen=seen,
            counts=counts,
        )


def _masks(masks: Masks, row: StepRow, drafts: int) -> bool:
    """Whether something may be forbidden after the row's last token and its first `drafts` drafts."""
    given = masks.get(row.request.request_id)
    if not given:
        return False
    num_output = row.start + row.num_tokens - len(row.drafts) - len(row.request.prompt) + drafts
    return any(mask.applies(num_output) for mask in given)


def _accepted(step: InFlight, row: StepRow, sampled: list[int], first: int) -> list[int]:
    """`sampled` after the row's last token and after each of its drafts, the kept tokens from `first` on."""
    for i, token in enumerate(sampled):
        error = step.errors.get(first + i)
        if error is None and token == NOT_FINITE:
            error = EngineError("the model's logits are not finite")
        if error is not None:
            step.failed[row.request.request_id] = error
            return []
        if i == len(row.drafts) or token != row.drafts[i]:
            return sampled[: i + 1]
    return []
