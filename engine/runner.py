"""Runs a step plan: fills the inputs, runs the model, samples.

launch_forward(plan) -> InFlight     launch_sample(step)     tokens(step) -> one list per row

On a GPU the first two only launch: on a stream of the runner's own, without waiting for it. `tokens` waits for its
step alone, not for what was launched after it.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.attention.base import BLOCK_SIZE, BatchLayout
from engine.graphs import PaddedDecode
from engine.linear.base import LoraBatch
from engine.linear.segments import Segments, cut
from engine.messages import TokenLogprobs
from engine.model.layers import Trace
from engine.model.qwen3_moe import Qwen3Moe
from engine.sampling import PendingLogprobs, SampleRow, is_greedy, sample
from engine.step_inputs import lora_groups
from engine.transfer import Arrival, to_device, to_host
from scheduler.plan import StepPlan, StepRow

_LOGPROB_ROWS = 64  # prompt log-probabilities are computed this many positions at a time: [64, V] float32


@dataclass
class InFlight:
    """A launched step. The i-th row that samples has its token at place i of `tokens` (and of the runner's `sampled`,
    for rows of the next step that wait for it)."""

    plan: StepPlan
    hidden: torch.Tensor | None  # [T, H], or one row per row that samples; None for a padded step
    row_starts: list[int]
    logits: torch.Tensor | None = None  # float32 [>= sampling rows, V], where `chosen` does not do without
    chosen: torch.Tensor | None = None  # int64 [sampling rows] already, if all of them are greedy
    tokens: torch.Tensor | None = None  # int64 on the host, valid once `arrival` has come
    arrival: Arrival | None = None
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)  # by request id, once the tokens are there
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # of positions start + 1 ...
    pending: PendingLogprobs | None = None
    pending_prompts: list[tuple[str, list[PendingLogprobs]]] = field(default_factory=list)
    trace: Trace | None = None
    phases: dict[str, float] = field(default_factory=dict)  # seconds
    launched_s: float = 0.0  # time.monotonic

    @property
    def sampling_rows(self) -> list[StepRow]:
        return [row for row in self.plan.rows if row.samples]


class ModelRunner:
    """Owns no request state: everything it needs is in the plan. `max_rows` requests at most are in a step."""

    def __init__(
        self,
        model: Qwen3Moe,
        device: torch.device,
        seed: int,
        tracing: bool = False,
        pool: Any = None,
        *,
        max_rows: int,
    ) -> None:
        self.model = model
        self.pool = pool
        self.device = device
        self.seed = seed
        self.tracing = tracing
        self.padded: PaddedDecode | None = None
        self.notes: list[str] = []  # what people should be told of how steps run
        self.spare_cpus: list[int] = []  # where the engine's own thread belongs beside a pinned pool of threads
        self.sampled = torch.zeros(max_rows, dtype=torch.int64, device=device)  # of the last step that sampled
        self._places: dict[str, int] = {}  # by request id, in `sampled`
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the weights were loaded on another stream
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pad_decode(self, max_rows: int, adapter_slots: int, scratch_block: int) -> PaddedDecode:
        """Run decode steps in padded sizes from now on; `capture` of what is returned, in `computing`, makes graphs."""
        self.padded = PaddedDecode(
            self.model, self.device, max_rows, adapter_slots, scratch_block, self.sampled, self.tracing
        )
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

    def launch_forward(self, plan: StepPlan) -> InFlight:
        launched_s = time.monotonic()
        padded = self.padded if self.padded and self.padded.takes(plan) else None
        with self.computing():
            slots = {row.adapter_slot for row in plan.rows} - {0}
            self.model.begin_step(plan.num_tokens, lora=bool(slots), eager=padded is None, slots=slots)
            try:
                step = self._launch_padded(plan, padded) if padded else self._launch(plan)
            except Exception:
                self.model.check()  # says why, if an expert backend knows
                raise
        step.launched_s = launched_s
        return step

    def launch_sample(self, step: InFlight) -> None:
        """Sample every row that samples; also what was asked of log-probabilities. The logits are there already, so the
        CPU pool's workers stay asleep (but for a prompt's log-probabilities, which wake them)."""
        began = time.perf_counter()
        done = step.chosen is not None and self._stream is None  # torch's code is not touched then: caches are cold
        with nullcontext() if done else self._launching():
            try:
                self._sample(step)
            except Exception:
                self.model.check()
                raise
        step.phases["sample_s"] = time.perf_counter() - began

    def tokens(self, step: InFlight) -> list[list[int]]:
        """Waits for the step. One list per row of the plan: the sampled token, or nothing. Raises what failed in it."""
        if step.arrival is not None:
            step.arrival.wait()
        self.model.check()
        if step.pending is not None:
            for row, logprobs in zip(step.sampling_rows, step.pending.read(), strict=True):
                if logprobs is not None:
                    step.logprobs[row.request.request_id] = logprobs
        for request_id, parts in step.pending_prompts:
            step.prompt_logprobs[request_id] = [x for part in parts for x in part.read() if x is not None]
        sampled = iter([] if step.tokens is None else step.tokens.tolist())
        return [[next(sampled)] if row.samples else [] for row in step.plan.rows]

    def _launch(self, plan: StepPlan) -> InFlight:
        began = time.perf_counter()
        batch, starts = self._layout(plan), [0]
        for row in plan.rows:
            starts.append(starts[-1] + row.num_tokens)
        lora = self._lora_batch(plan)
        ids = self._token_ids(plan)
        trace = Trace() if self.tracing else None
        filled = time.perf_counter()
        keep = self._kept(plan, starts)
        step = InFlight(plan, None, starts, trace=trace)
        last = [starts[i + 1] - 1 for i, row in enumerate(plan.rows) if row.samples]
        if last and (keep is not None or len(last) == starts[-1]) and _likeliest_suffice(plan):
            step.hidden, step.chosen = self.model.greedy_rows(ids, batch, lora, keep, trace)
        elif keep is not None:
            step.hidden = self.model.forward_rows(ids, batch, lora, keep, trace)
            step.logits = self.model.logits(step.hidden) if last else None
        else:
            step.hidden = self.model.forward(ids, batch, lora, trace)
            rows = step.hidden if len(last) == starts[-1] else step.hidden[to_device(last, torch.int64, self.device)]
            step.logits = self.model.logits(rows) if last else None
        step.phases = {"prepare_s": filled - began, "forward_s": time.perf_counter() - filled}
        return step

    def _kept(self, plan: StepPlan, starts: list[int]) -> torch.Tensor | None:
        """The tokens whose final hidden state is wanted, int64 (any one, if none is); None for all of them."""
        if any(row.request.sampling.prompt_logprobs is not None for row in plan.rows):
            return None
        last = [starts[i + 1] - 1 for i, row in enumerate(plan.rows) if row.samples] or [0]
        return to_device(last, torch.int64, self.device) if len(last) < starts[-1] else None

    def _launch_padded(self, plan: StepPlan, padded: PaddedDecode) -> InFlight:
        began = time.perf_counter()
        trace = padded.launch(plan, self._places)
        phases = {"prepare_s": 0.0, "forward_s": time.perf_counter() - began}
        starts, chosen = list(range(len(plan.rows) + 1)), None
        if _likeliest_suffice(plan):
            chosen = self.sampled[: len(plan.rows)]
        return InFlight(plan, None, starts, padded.logits, chosen, trace=trace, phases=phases)

    def _sample(self, step: InFlight) -> None:
        rows = step.sampling_rows
        if rows:
            tokens = step.chosen
            if tokens is None:
                if step.logits is None:
                    raise RuntimeError("a step that samples has tokens or logits")
                tokens, logits = sample(step.logits[: len(rows)], [self._sample_row(row) for row in rows])
                step.pending = PendingLogprobs(logits, tokens, [row.request.sampling.logprobs for row in rows])
            step.tokens = self._deliver(tokens)
        self._places = {row.request.request_id: i for i, row in enumerate(rows)}
        for i, row in enumerate(step.plan.rows):
            top = row.request.sampling.prompt_logprobs
            if top is not None and row.start + 1 < len(row.request.prompt):
                step.pending_prompts.append((row.request.request_id, self._prompt_logprobs(step, i, row, top)))
        step.arrival = Arrival(self.device)

    def _deliver(self, tokens: torch.Tensor) -> torch.Tensor:
        """Put them into `sampled`, for the next step; returns them on the host, valid once the step's arrival has come.

        Padded steps read and write `sampled` where it is, so there it is copied from and to.
        """
        if self.padded is None:
            self.sampled = tokens
            return to_host(tokens)
        mine = self.sampled[: len(tokens)]
        if mine.data_ptr() != tokens.data_ptr():
            mine.copy_(tokens)
        return mine.clone() if self.device.type == "cpu" else to_host(mine)

    def _layout(self, plan: StepPlan) -> BatchLayout:
        positions: list[int] = []
        slots: list[int] = []
        starts, contexts = [0], []
        for row, table in zip(plan.rows, plan.block_tables, strict=True):
            for position in range(row.start, row.start + row.num_tokens):
                positions.append(position)
                slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            starts.append(starts[-1] + row.num_tokens)
            contexts.append(row.start + row.num_tokens)
        return BatchLayout(
            row_starts=starts,
            context_lens=contexts,
            block_tables=plan.block_tables,
            positions=to_device(positions, torch.int64, self.device),
            slot_mapping=to_device(slots, torch.int64, self.device),
        )

    def _token_ids(self, plan: StepPlan) -> torch.Tensor:
        """int64 [T]. A token that the step before is still to deliver is copied on the device."""
        ids: list[int] = []
        targets: list[int] = []
        places: list[int] = []
        for row in plan.rows:
            for position in range(row.start, row.start + row.num_tokens):
                token = row.request.token(position)
                if token is None:
                    targets.append(len(ids))
                    places.append(self._places[row.request.request_id])
                ids.append(0 if token is None else token)
        out = to_device(ids, torch.int64, self.device)
        if targets:
            source = to_device(places, torch.int64, self.device)
            out[to_device(targets, torch.int64, self.device)] = self.sampled[source]
        return out

    def _lora_batch(self, plan: StepPlan) -> LoraBatch | None:
        slots = [row.adapter_slot for row in plan.rows for _ in range(row.num_tokens)]
        if not any(slots):
            return None
        segments = None
        if self.device.type == "cuda":
            order, tiles = cut(slots)
            flat = to_device([value for tile in tiles for value in tile], torch.int32, self.device)
            segments = Segments(to_device(order, torch.int32, self.device), flat.view(-1, 3))
        return LoraBatch(to_device(slots, torch.int32, self.device), lora_groups(slots, self.device), segments)

    def _sample_row(self, row: StepRow) -> SampleRow:
        request = row.request
        p = request.sampling
        counts = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
        return SampleRow(
            params=p,
            seed=self.seed ^ zlib.crc32(request.request_id.encode()) if p.seed is None else p.seed,
            position=row.start + row.num_tokens,
            prompt=Counter(request.prompt) if counts else Counter(),
            output=Counter(request.output) if counts else Counter(),
        )

    def _prompt_logprobs(self, step: InFlight, index: int, row: StepRow, top: int) -> list[PendingLogprobs]:
        """Of the prompt's tokens at positions start + 1 ... start + num_tokens, as far as the prompt goes."""
        prompt = row.request.prompt
        targets = prompt[row.start + 1 : row.start + row.num_tokens + 1]
        out: list[PendingLogprobs] = []
        if step.hidden is None:
            raise RuntimeError("a step that reads a prompt has hidden states")
        for at in range(0, len(targets), _LOGPROB_ROWS):
            part = to_device(targets[at : at + _LOGPROB_ROWS], torch.int64, self.device)
            first = step.row_starts[index] + at
            logits = self.model.logits(step.hidden[first : first + len(part)])
            out.append(PendingLogprobs(logits, part, [top] * len(part)))
        return out


def _likeliest_suffice(plan: StepPlan) -> bool:
    """Whether the likeliest token is all that any row wants of its logits."""
    return all(is_greedy(row.request.sampling) for row in plan.rows if row.samples)
