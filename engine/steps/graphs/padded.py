"""Decode steps of a padded size: the same launches for every batch up to it, so that one CUDA graph replays them all.

    rows 1 2 3 4 5 | pad pad pad    bucket 8: five valid rows (bsz), three write to a scratch block and are ignored

Drafts are rows of their own, which read the same blocks as the token before them, one position more.
Everything that differs from step to step lies in arrays at fixed addresses (`PaddedInputs`), which one copy fills.
Two families of graphs: base only, and with adapters. The second may be replayed for any mix of adapters.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.attention.base import BatchLayout
from engine.config import bucket_sizes
from engine.linear.base import LoraBatch
from engine.linear.segments import Groups, Segments, max_tiles
from engine.model.causal_lm import CausalLM
from engine.model.load import Progress
from engine.model.step import Executor, StepInput, Trace
from engine.steps.graphs.inputs import PaddedInputs
from engine.steps.inputs import StepArrays
from scheduler.plan import NO_STATE, RowState, StepPlan

_SCRATCH = RowState(NO_STATE, NO_STATE)  # of a padding row


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    trace: Trace | None  # if steps are traced


class PaddedDecode:
    """Runs decode steps in padded sizes, captured (`capture`) or launched one by one by `executor`, with equal results.

    `scratch_block`: a KV block that belongs to no request, the last one. A step's results stay until the next one:
    `logits` in the activations' dtype, [M, V] or this rank's part of it; `greedy` int64 [M], each row's greedy token
    or NOT_FINITE; `sampled`, the same, but always a token; with `keep_hidden`, `hidden` [M, H].
    """

    def __init__(
        self,
        model: CausalLM,
        executor: Executor,
        max_rows: int,
        adapter_slots: int,
        scratch_block: int,
        sampled: torch.Tensor,
        tracing: bool = False,
        *,
        keep_hidden: bool = False,
    ) -> None:
        self.model = model
        self.buckets = bucket_sizes(max_rows)
        self.inputs = PaddedInputs(max_rows, adapter_slots, scratch_block, model.device)
        self.logits = torch.full((max_rows, model.head.width), -torch.inf, dtype=model.dtype, device=model.device)
        self.hidden: torch.Tensor | None = None
        if keep_hidden:
            self.hidden = torch.zeros(max_rows, model.config.hidden_size, dtype=model.dtype, device=model.device)
        self._pairs = torch.zeros(max_rows, 2, device=model.device)  # what ranks exchange for `greedy`
        self.greedy = torch.zeros_like(sampled)
        self.sampled = sampled
        self._executor = executor
        self._scratch = array("i", [scratch_block])
        self._tracing = tracing
        self._takes_drafts = all(attention.rows_share for attention in model.attention_backends)
        self._graphs: dict[tuple[int, bool], _Captured] = {}
        self._pool: Any = None

    @property
    def lora_families(self) -> list[bool]:
        return [False, True] if self.inputs.adapter_slots else [False]

    def takes(self, plan: StepPlan) -> bool:
        """Whether every row samples after each of its tokens, none has drafts to put into its state first, and no
        adapter has MLPs of its own (never captured)."""
        if not 1 <= plan.num_tokens <= self.buckets[-1]:
            return False
        if not plan.single and not (self._takes_drafts and all(row.num_samples == row.num_tokens for row in plan.rows)):
            return False
        if self.model.keeps_states and any(row.state.replayed for row in plan.rows if row.state):
            return False
        apart = self.model.slots_with_extra_mlps
        return not apart or apart.isdisjoint([row.adapter_slot for row in plan.rows])

    def launch(self, step: StepArrays) -> Trace | None:
        """Fills `logits`, `greedy` and `sampled`."""
        rows, lora = step.num_tokens, step.adapted
        bucket = next(size for size in self.buckets if size >= rows)
        self.inputs.fill(step, rows)
        self.model.plan(self._layout(step, bucket))
        captured = self._graphs.get((bucket, lora))
        if captured is None:
            trace = self._run(step, bucket, lora)
        else:
            captured.graph.replay()
            trace = captured.trace
        # copied: the next replay overwrites a graph's own
        return trace and Trace([ids[:rows].clone() for ids in trace.ids])

    def capture(self, progress: Progress, sizes: Sequence[int] | None = None) -> None:
        """Make graphs of all sizes (or those given): base only and, if there are adapter slots, with adapters."""
        every = sorted(sizes or self.buckets, reverse=True)
        todo = [(bucket, lora) for bucket in every for lora in self.lora_families]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with _no_collection():
            for done, (bucket, lora) in enumerate(todo):
                progress("Capturing CUDA graphs", done, len(todo))
                self._graphs[bucket, lora] = self._capture(bucket, lora)
        progress("Capturing CUDA graphs", len(todo), len(todo))

    def _capture(self, bucket: int, lora: bool) -> _Captured:
        nothing, device = StepArrays.of(StepPlan(0, [], []), {}), self.model.device
        self.inputs.fill(nothing, 0)
        for _ in range(1 if self._graphs else 2):  # kernels are compiled, workspaces are allocated
            self.model.begin_step(0, lora=lora, eager=False)
            self.model.plan(self._layout(nothing, bucket))
            self._run(nothing, bucket, lora)
            torch.cuda.current_stream(device).synchronize()
            self.model.check()
        graph = torch.cuda.CUDAGraph()
        self.model.begin_step(0, lora=lora, eager=False)
        stream = torch.cuda.current_stream(device)
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            trace = self._run(nothing, bucket, lora)
        self.model.check()
        return _Captured(graph, trace)

    def _run(self, step: StepArrays, bucket: int, lora: bool) -> Trace | None:
        i, trace = self.inputs, Trace() if self._tracing else None
        ids = self.model.ops.next_ids(i["ids"][:bucket], i["sources"][:bucket], self.sampled)
        adapters = self._lora(step, bucket) if lora else None
        given = StepInput(ids, self._layout(step, bucket), adapters, bsz=i["bsz"], trace=trace)
        head, logits = self.model.head, self.logits[:bucket]
        hidden = self._executor.forward(given).hidden
        if self.hidden is not None:
            self.hidden[:bucket].copy_(hidden)
        head.into(hidden, logits)
        head.greedy(self.model.ops, logits, self._pairs, self.greedy, self.sampled)
        return trace

    def _lora(self, step: StepArrays, bucket: int) -> LoraBatch:
        """`groups` are for backends that cannot be captured; in a graph there are none, segments say it all."""
        i = self.inputs
        segments = Segments(i["order"][:bucket], i["tiles"][: max_tiles(bucket, i.adapter_slots)])
        return LoraBatch(i["slots"][:bucket], Groups.of(step.adapters).tokens(self.model.device), segments)

    def _layout(self, step: StepArrays, bucket: int) -> BatchLayout:
        padding, tables = bucket - step.num_tokens, step.block_tables
        if not step.single:
            lengths = np.diff(step.row_starts).tolist()
            tables = [table for table, tokens in zip(tables, lengths, strict=True) for _ in range(tokens)]
        return BatchLayout(
            row_starts=list(range(bucket + 1)),
            context_lens=(step.positions + 1).tolist() + [1] * padding,
            block_tables=[*tables, *[self._scratch] * padding],
            positions=self.inputs["positions"][:bucket],
            slot_mapping=self.inputs["slot_mapping"][:bucket],
            padded=True,
            states=[*step.states, *[_SCRATCH] * padding] if self.model.keeps_states else [],
        )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage that is collected during a capture may free GPU or pinned memory, which ends the capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def graph_blocker(model: CausalLM) -> str | None:
    """Why a model's decode steps cannot be captured in CUDA graphs; None if they can."""
    if model.device.type != "cuda":
        return "no GPU"
    for attention in model.attention_backends:
        if not attention.captures:
            return f"attention by {type(attention).__name__} cannot be captured"
    for experts in model.expert_backends:
        if not experts.follows_stream:
            return f"experts by {type(experts).__name__} do not follow a stream"
    for name, linear in model.linears.items():
        if not linear.captures:
            return f"{name} by {type(linear).__name__} cannot be captured"
    return None
