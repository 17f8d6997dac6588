"""Decode steps of a padded size: the same launches for every batch up to it, so that one CUDA graph replays them all.

    rows 1 2 3 4 5 | pad pad pad       bucket 8: five rows count (bsz), three write to a scratch block and are ignored
    rows 1 2 3 pad | rows 4 5 pad pad  the same as two half-batches in turn, where that is faster (ping_pong.py)

Everything that differs from step to step lies in arrays at fixed addresses (`StepInputs`), which one copy fills.
Two families of graphs: base only, and with adapters. The second may be replayed for any mix of adapters.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.attention.base import BLOCK_SIZE, BatchLayout
from engine.linear.base import LoraBatch
from engine.linear.segments import Segments, max_tiles
from engine.model.halves import PartBatch, joined, run_halves
from engine.model.layers import Trace
from engine.model.qwen3_moe import Qwen3Moe
from engine.ping_pong import Chooser, Work
from engine.step_inputs import StepInputs, bucket_sizes, lora_groups
from engine.transfer import Stopwatch
from scheduler.plan import StepPlan

Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    traces: list[Trace]  # of each part, if steps are traced


@dataclass(frozen=True)
class _Part:
    """A step, or half of it, padded to `bucket` rows; `inputs` are its arrays."""

    number: int
    bucket: int
    inputs: StepInputs
    plan: StepPlan


class PaddedDecode:
    """Runs decode steps in padded sizes, captured (`capture`) or launched one by one, with equal results.

    `scratch_block`: a KV block that belongs to no request, the last one. `logits` float32 [M, V] and `sampled` int64
    [M] hold a step's results (the likeliest token of each row) until the next one.
    """

    def __init__(
        self,
        model: Qwen3Moe,
        device: torch.device,
        max_rows: int,
        adapter_slots: int,
        scratch_block: int,
        sampled: torch.Tensor,
        tracing: bool = False,
    ) -> None:
        self.model = model
        self.buckets = bucket_sizes(max_rows)
        self.inputs = StepInputs(max_rows, adapter_slots, device)
        self.second: StepInputs | None = None  # of the second half-batch
        self.logits = torch.zeros(max_rows, model.config.vocab_size, dtype=torch.float32, device=device)
        self.sampled = sampled
        self.chooser: Chooser | None = None  # whether a step runs as two half-batches; None: never
        self._device = device
        self._scratch = scratch_block
        self._tracing = tracing
        self._halved: set[int] = set()  # sizes that may run as two half-batches
        self._graphs: dict[tuple[int, bool, bool], _Captured] = {}
        self._pool: Any = None
        self._timed: deque[tuple[Work, bool, Stopwatch]] = deque()  # steps that the chooser has not heard of

    @property
    def lora_families(self) -> list[bool]:
        return [False, True] if self.inputs.adapter_slots else [False]

    def takes(self, plan: StepPlan) -> bool:
        """Whether every row brings one token and samples, and no adapter has MLPs of its own (never captured)."""
        if not 1 <= len(plan.rows) <= self.buckets[-1]:
            return False
        if not all(row.num_tokens == 1 and row.samples for row in plan.rows):
            return False
        used = {row.adapter_slot for row in plan.rows} - {0}
        return not used & self.model.slots_with_extra_mlps

    @torch.inference_mode(False)  # memory that is written to in and out of that mode
    def halve(self, sizes: Sequence[int]) -> None:
        """Let steps of these sizes run as two half-batches when `chooser` says so."""
        self._halved = {size for size in sizes if size > 1}
        if self._halved and self.second is None:
            most = max(self.buckets) // 2
            self.second = StepInputs(most, self.inputs.adapter_slots, self._device)
            self.model.add_buffer_set(most)

    def launch(self, plan: StepPlan, sources: dict[str, int]) -> Trace | None:
        """`sources`: by request id, the place in `sampled` of a token still to come. Fills `logits` and `sampled`."""
        bucket = next(size for size in self.buckets if size >= len(plan.rows))
        lora = any(row.adapter_slot for row in plan.rows)
        work = Work(len(plan.rows), sum(row.start + 1 for row in plan.rows), lora)
        halves = self._chosen(bucket, work)
        parts = self._parts(plan, bucket, halves)
        for part in parts:
            part.inputs.fill(len(part.plan.rows), self._columns(part, sources), _slots(part.plan))
            self.model.plan(self._layout(part))
        captured = self._graphs.get((bucket, lora, halves))
        watch = Stopwatch(self._device) if self.chooser and self.chooser.learns else None
        if captured is None:
            traces = self._run(parts, lora)
        else:
            captured.graph.replay()
            traces = captured.traces
        if watch is not None:
            watch.stop()
            self._timed.append((work, halves, watch))
        return _rows_of(traces, parts)

    def capture(self, progress: Progress, sizes: Sequence[int] | None = None, *, halves: bool = False) -> None:
        """Make graphs: of all sizes (or those given), base only and (if there are adapter slots) with adapters; of
        half-batches, of sizes that `halve` was told."""
        every = sizes or (sorted(self._halved) if halves else self.buckets)
        todo = [(bucket, lora) for bucket in sorted(every, reverse=True) for lora in self.lora_families]
        what = "Capturing CUDA graphs of half-batches" if halves else "Capturing CUDA graphs"
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with _no_collection():
            for done, (bucket, lora) in enumerate(todo):
                progress(what, done, len(todo))
                self._graphs[bucket, lora, halves] = self._capture(bucket, lora, halves)
        progress(what, len(todo), len(todo))

    def idle_s(self, bucket: int, lora: bool, contexts: int = 1, repeats: int = 5) -> float:
        """Seconds of a captured step of which no row counts and every row reads `contexts` positions: all but the
        experts, without what follows the layers. No step may be in flight."""
        part = self._parts(_EMPTY, bucket, False)[0]
        part.inputs.fill(0, self._columns(part, {}), [])
        blocks = min(-(-contexts // BLOCK_SIZE), self._scratch)
        layout = self._layout(part)
        layout.context_lens = [min(contexts, blocks * BLOCK_SIZE)] * bucket
        layout.block_tables = [
            tuple((row * blocks + i) % self._scratch for i in range(blocks)) for row in range(bucket)
        ]
        hidden = torch.zeros(bucket, self.model.config.hidden_size, dtype=self.model.dtype, device=self._device)

        def layers() -> None:
            self.model.begin_step(0, lora=lora, eager=False)
            self.model.plan(layout)
            self._graphs[bucket, lora, False].graph.replay()

        def seconds(run: Callable[[], object]) -> float:
            watch = Stopwatch(self._device)
            run()
            watch.stop()
            found = watch.seconds
            self.model.check()
            return found

        all_s = min(seconds(layers) for _ in range(repeats))
        return max(all_s - min(seconds(lambda: self.model.logits(hidden)) for _ in range(repeats)), 0.0)

    def _chosen(self, bucket: int, work: Work) -> bool:
        if self.chooser is None:
            return False
        while self._timed and self._timed[0][2].ended:
            seen, halves, watch = self._timed.popleft()
            self.chooser.observe(seen, halves, watch.seconds)
        return bucket in self._halved and self.chooser.halves(work)

    def _parts(self, plan: StepPlan, bucket: int, halves: bool) -> list[_Part]:
        if not halves or self.second is None:
            return [_Part(0, bucket, self.inputs, plan)]
        rows, most = -(-len(plan.rows) // 2), -(-bucket // 2)
        first = replace(plan, rows=plan.rows[:rows], block_tables=plan.block_tables[:rows])
        last = replace(plan, rows=plan.rows[rows:], block_tables=plan.block_tables[rows:])
        return [_Part(0, most, self.inputs, first), _Part(1, bucket - most, self.second, last)]

    def _capture(self, bucket: int, lora: bool, halves: bool) -> _Captured:
        parts = self._parts(_EMPTY, bucket, halves)
        for part in parts:
            part.inputs.fill(0, self._columns(part, {}), [])
        for _ in range(2):  # kernels are compiled, workspaces are allocated
            self.model.begin_step(0, lora=lora, eager=False)
            for part in parts:
                self.model.plan(self._layout(part))
            self._run(parts, lora)
            torch.cuda.current_stream(self._device).synchronize()
            self.model.check()
        graph = torch.cuda.CUDAGraph()
        self.model.begin_step(0, lora=lora, eager=False)
        stream = torch.cuda.current_stream(self._device)
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            traces = self._run(parts, lora)
        self.model.check()
        return _Captured(graph, traces)

    def _run(self, parts: list[_Part], lora: bool) -> list[Trace]:
        batches = [self._batch(part, lora) for part in parts]
        if len(batches) == 1:
            b = batches[0]
            hidden = self.model.run(b.ids, b.batch, b.lora, b.bsz, b.trace)
        else:
            hidden = joined(run_halves(self.model, batches), batches[0].bsz)
        rows = hidden.shape[0]
        self.logits[:rows].copy_(self.model.logits(hidden))
        self.sampled[:rows].copy_(self.logits[:rows].argmax(dim=-1))
        return [b.trace for b in batches if b.trace is not None]

    def _batch(self, part: _Part, lora: bool) -> PartBatch:
        i, bucket = part.inputs, part.bucket
        sources = i["sources"][:bucket]
        ids = torch.where(sources >= 0, self.sampled[sources.clamp(min=0)], i["ids"][:bucket])
        adapters = self._lora(part) if lora else None
        return PartBatch(ids, self._layout(part), adapters, i["bsz"], Trace() if self._tracing else None)

    def _lora(self, part: _Part) -> LoraBatch:
        """`groups` are for backends that cannot be captured; in a graph there are none, segments say it all."""
        i = part.inputs
        segments = Segments(i["order"][: part.bucket], i["tiles"][: max_tiles(part.bucket, i.adapter_slots)])
        return LoraBatch(i["slots"][: part.bucket], lora_groups(_slots(part.plan), self._device), segments)

    def _layout(self, part: _Part) -> BatchLayout:
        plan, bucket = part.plan, part.bucket
        padding = bucket - len(plan.rows)
        return BatchLayout(
            row_starts=list(range(bucket + 1)),
            context_lens=[row.start + 1 for row in plan.rows] + [1] * padding,
            block_tables=[*plan.block_tables, *[(self._scratch,)] * padding],
            positions=part.inputs["positions"][:bucket],
            slot_mapping=part.inputs["slot_mapping"][:bucket],
            padded=True,
            part=part.number,
        )

    def _columns(self, part: _Part, sources: dict[str, int]) -> dict[str, list[int]]:
        plan = part.plan
        padding = part.bucket - len(plan.rows)
        tokens = [row.request.token(row.start) for row in plan.rows]
        pending = [
            -1 if token is not None else sources[row.request.request_id]
            for row, token in zip(plan.rows, tokens, strict=True)
        ]
        slots = [
            table[row.start // BLOCK_SIZE] * BLOCK_SIZE + row.start % BLOCK_SIZE
            for row, table in zip(plan.rows, plan.block_tables, strict=True)
        ]
        return {
            "ids": [token or 0 for token in tokens] + [0] * padding,
            "sources": pending + [-1] * padding,
            "positions": [row.start for row in plan.rows] + [0] * padding,
            "slot_mapping": slots + [self._scratch * BLOCK_SIZE] * padding,
        }


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


_EMPTY = StepPlan(0, [], [])


def _slots(plan: StepPlan) -> list[int]:
    return [row.adapter_slot for row in plan.rows]


def _rows_of(traces: list[Trace], parts: list[_Part]) -> Trace | None:
    """One trace of the rows that count, copied: the next replay overwrites a graph's own."""
    if not traces:
        return None
    counts = [len(part.plan.rows) for part in parts]
    layers = zip(*(trace.ids for trace in traces), strict=True)
    ids = [torch.cat([part[:rows] for part, rows in zip(layer, counts, strict=True)]) for layer in layers]
    return Trace(ids)
