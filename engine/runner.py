"""Runs a step plan: fills the inputs, runs the model, samples.

launch_forward(plan) -> InFlight     launch_sample(step)     tokens(step) -> one list per row
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.attention.base import BLOCK_SIZE, BatchLayout
from engine.linear.base import LoraBatch
from engine.messages import TokenLogprobs
from engine.model.qwen3_moe import Qwen3Moe, Trace
from engine.sampling import SampleRow, sample, token_logprobs
from scheduler.plan import StepPlan, StepRow

_LOGPROB_ROWS = 64  # prompt log-probabilities are computed this many positions at a time: [64, V] float32


@dataclass
class InFlight:
    """A launched step. `sampled[i]` belongs to the i-th row that samples."""

    plan: StepPlan
    hidden: torch.Tensor  # [T, H]
    row_starts: list[int]
    sampled: torch.Tensor | None = None  # int64, on the device
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)  # by request id
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # of positions start + 1 ...
    trace: Trace | None = None
    phases: dict[str, float] = field(default_factory=dict)  # seconds
    launched_s: float = 0.0  # time.monotonic

    @property
    def sampling_rows(self) -> list[StepRow]:
        return [row for row in self.plan.rows if row.samples]


class ModelRunner:
    """Owns no request state: everything it needs is in the plan."""

    def __init__(
        self, model: Qwen3Moe, device: torch.device, seed: int, tracing: bool = False, pool: Any = None
    ) -> None:
        self.model = model
        self.pool = pool
        self.device = device
        self.seed = seed
        self.tracing = tracing
        self._previous: InFlight | None = None  # holds the tokens that a decode row may still wait for

    @torch.inference_mode()
    def launch_forward(self, plan: StepPlan) -> InFlight:
        launched_s, began = time.monotonic(), time.perf_counter()
        batch, starts = self._layout(plan), [0]
        for row in plan.rows:
            starts.append(starts[-1] + row.num_tokens)
        ids, lora = self._token_ids(plan), self._lora_batch(plan)
        trace = Trace() if self.tracing else None
        filled = time.perf_counter()
        with self._workers_awake():
            hidden = self.model.forward(ids, batch, lora, trace)
        phases = {"prepare_s": filled - began, "forward_s": time.perf_counter() - filled}
        return InFlight(plan, hidden, starts, trace=trace, phases=phases, launched_s=launched_s)

    @torch.inference_mode()
    def launch_sample(self, step: InFlight) -> None:
        """Sample every row that samples; also what was asked of log-probabilities."""
        began = time.perf_counter()
        rows = step.sampling_rows
        if rows:
            last = [step.row_starts[i + 1] - 1 for i, row in enumerate(step.plan.rows) if row.samples]
            with self._workers_awake():
                logits = self.model.logits(step.hidden[torch.tensor(last, device=self.device)])
            step.sampled, logits = sample(logits, [self._sample_row(row) for row in rows])
            asked = [row.request.sampling.logprobs for row in rows]
            for row, logprobs in zip(rows, token_logprobs(logits, step.sampled, asked), strict=True):
                if logprobs is not None:
                    step.logprobs[row.request.request_id] = logprobs
        for i, row in enumerate(step.plan.rows):
            top = row.request.sampling.prompt_logprobs
            if top is not None and row.start + 1 < len(row.request.prompt):
                step.prompt_logprobs[row.request.request_id] = self._prompt_logprobs(step, i, row, top)
        self._previous = step
        step.phases["sample_s"] = time.perf_counter() - began

    def tokens(self, step: InFlight) -> list[list[int]]:
        """Waits for the step. One list per row of the plan: the sampled token, or nothing."""
        sampled = iter([] if step.sampled is None else step.sampled.tolist())
        return [[next(sampled)] if row.samples else [] for row in step.plan.rows]

    @contextmanager
    def _workers_awake(self) -> Iterator[None]:
        """The CPU pool's workers spin for as long; otherwise they sleep."""
        if self.pool is None:
            yield
            return
        self.pool.begin_step()
        try:
            yield
        finally:
            self.pool.end_step()

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
            positions=torch.tensor(positions, dtype=torch.int64, device=self.device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=self.device),
        )

    def _token_ids(self, plan: StepPlan) -> torch.Tensor:
        """int64 [T]. A token that the step before is still to deliver is copied on the device."""
        ids: list[int] = []
        pending: list[tuple[int, str]] = []
        for row in plan.rows:
            for position in range(row.start, row.start + row.num_tokens):
                token = row.request.token(position)
                if token is None:
                    pending.append((len(ids), row.request.request_id))
                ids.append(0 if token is None else token)
        out = torch.tensor(ids, dtype=torch.int64, device=self.device)
        if pending:
            before = self._previous
            if before is None or before.sampled is None:
                raise RuntimeError("a row waits for a token that no launched step samples")
            place = {row.request.request_id: i for i, row in enumerate(before.sampling_rows)}
            targets = torch.tensor([at for at, _ in pending], device=self.device)
            out[targets] = before.sampled[torch.tensor([place[rid] for _, rid in pending], device=self.device)]
        return out

    def _lora_batch(self, plan: StepPlan) -> LoraBatch | None:
        if all(row.adapter_slot == 0 for row in plan.rows):
            return None
        slots = torch.tensor([row.adapter_slot for row in plan.rows for _ in range(row.num_tokens)], dtype=torch.int32)
        groups = [
            (slot, torch.where(slots == slot)[0].to(self.device))
            for slot in sorted({row.adapter_slot for row in plan.rows} - {0})
        ]
        return LoraBatch(slots.to(self.device), groups)

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

    def _prompt_logprobs(self, step: InFlight, index: int, row: StepRow, top: int) -> list[TokenLogprobs]:
        """Of the prompt's tokens at positions start + 1 ... start + num_tokens, as far as the prompt goes."""
        prompt = row.request.prompt
        targets = prompt[row.start + 1 : row.start + row.num_tokens + 1]
        out: list[TokenLogprobs] = []
        for at in range(0, len(targets), _LOGPROB_ROWS):
            part = torch.tensor(targets[at : at + _LOGPROB_ROWS], device=self.device)
            first = step.row_starts[index] + at
            logits = self.model.logits(step.hidden[first : first + len(part)])
            out.extend(x for x in token_logprobs(logits, part, [top] * len(part)) if x is not None)
        return out
