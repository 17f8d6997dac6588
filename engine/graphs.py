"""Decode steps of a padded size: the same launches for every batch up to it, so that one CUDA graph replays them all.

    rows 1 2 3 4 5 | pad pad pad      bucket 8: five rows count (bsz), three write to a scratch block and are ignored

Everything that differs from step to step lies in arrays at fixed addresses (`StepInputs`), which one copy fills.
Two families of graphs: base only, and with adapters. The second may be replayed for any mix of adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.base import BLOCK_SIZE, BatchLayout
from engine.linear.base import LoraBatch
from engine.linear.segments import Segments, cut, max_tiles
from engine.model.qwen3_moe import Qwen3Moe, Trace
from engine.transfer import to_device
from scheduler.plan import StepPlan

Progress = Callable[[str, int, int], None]  # stage, done, total

_SMALL = (1, 2, 4)
_STEP = 8  # above, sizes are multiples of this


def bucket_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, ... and max_rows itself."""
    sizes = [*_SMALL, *range(_STEP, max_rows, _STEP), max_rows]
    return sorted({size for size in sizes if size <= max_rows})


class StepInputs:
    """Arrays of M rows at fixed addresses on `device`, parts of one buffer.

    ids, sources, positions, slot_mapping int64 [M]: a row's token is sampled[source] of the step before where
    source >= 0. bsz int32 [1], slots int32 [M], order int32 [M], tiles int32 [n, 3] as in engine.linear.segments.
    """

    def __init__(self, max_rows: int, adapter_slots: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.adapter_slots = adapter_slots
        self._device = device
        tiles = max_tiles(max_rows, adapter_slots)
        self._buffer = torch.zeros(8 * 4 * max_rows + 4 * (2 + 2 * max_rows + 3 * tiles), dtype=torch.uint8)
        if device.type == "cuda":
            self._buffer = self._buffer.to(device)
        self._views = self._split(self._buffer)

    def _split(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        m = self.max_rows
        wide, narrow = buffer[: 32 * m].view(torch.int64), buffer[32 * m :].view(torch.int32)
        views = dict(zip(("ids", "sources", "positions", "slot_mapping"), wide.split(m), strict=True))  # type: ignore[no-untyped-call]
        views["bsz"], views["slots"], views["order"] = narrow[:1], narrow[2 : 2 + m], narrow[2 + m : 2 + 2 * m]
        views["tiles"] = narrow[2 + 2 * m :].view(-1, 3)
        return views

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._views[name]

    def fill(self, rows: int, values: dict[str, list[int]], slots: list[int]) -> None:
        """`values` of ids, sources, positions and slot_mapping, padded; `rows` of them count."""
        on_gpu = self._device.type == "cuda"
        staging = torch.zeros(self._buffer.shape, dtype=torch.uint8, pin_memory=on_gpu)
        views = self._split(staging)
        for name, column in values.items():
            views[name][: len(column)] = torch.tensor(column, dtype=torch.int64)
        views["bsz"][0] = rows
        order, tiles = cut(slots)
        if tiles:
            views["slots"][: len(slots)] = torch.tensor(slots, dtype=torch.int32)
            views["order"][: len(order)] = torch.tensor(order, dtype=torch.int32)
            views["tiles"][: len(tiles)] = torch.tensor(tiles, dtype=torch.int32)
        self._buffer.copy_(staging, non_blocking=on_gpu)  # one copy; pinned memory is not reused before it ended


def lora_groups(slots: Sequence[int], device: torch.device) -> list[tuple[int, torch.Tensor]]:
    """(slot, its tokens' indices int64) of each adapter in a batch."""
    members: dict[int, list[int]] = {}
    for token, slot in enumerate(slots):
        if slot:
            members.setdefault(slot, []).append(token)
    return [(slot, to_device(members[slot], torch.int64, device)) for slot in sorted(members)]


def obstacle(model: Qwen3Moe) -> str | None:
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


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    trace: Trace | None


class PaddedDecode:
    """Runs decode steps in padded sizes, captured (`capture`) or launched one by one, with equal results.

    `scratch_block`: a KV block that belongs to no request. `logits` float32 [M, V] and `sampled` int64 [M] hold a
    step's results (the likeliest token of each row) until the next one.
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
        self.logits = torch.zeros(max_rows, model.config.vocab_size, dtype=torch.float32, device=device)
        self.sampled = sampled
        self._device = device
        self._scratch = scratch_block
        self._tracing = tracing
        self._graphs: dict[tuple[int, bool], _Captured] = {}

    def takes(self, plan: StepPlan) -> bool:
        """Whether every row brings one token and samples, and no adapter has MLPs of its own (never captured)."""
        if not 1 <= len(plan.rows) <= self.buckets[-1]:
            return False
        if not all(row.num_tokens == 1 and row.samples for row in plan.rows):
            return False
        used = {row.adapter_slot for row in plan.rows} - {0}
        return not used & self.model.slots_with_extra_mlps

    def launch(self, plan: StepPlan, sources: dict[str, int]) -> Trace | None:
        """`sources`: by request id, the place in `sampled` of a token still to come. Fills `logits` and `sampled`."""
        rows = len(plan.rows)
        bucket = next(size for size in self.buckets if size >= rows)
        slots = [row.adapter_slot for row in plan.rows]
        lora = any(slots)
        layout = self._layout(plan, bucket)
        self.inputs.fill(rows, self._columns(plan, bucket, sources), slots)
        self.model.plan(layout)
        captured = self._graphs.get((bucket, lora))
        if captured is None:
            trace = self._run(bucket, layout, self._lora(bucket, slots) if lora else None)
        else:
            captured.graph.replay()
            trace = captured.trace
        if trace is not None:  # the next replay overwrites a graph's own
            trace = Trace([ids[:rows].clone() for ids in trace.ids])
        return trace

    def capture(self, progress: Progress, sizes: Sequence[int] | None = None) -> None:
        """Make every graph: all sizes (or those given), base only and (if there are adapter slots) with adapters."""
        families = [False, True] if self.inputs.adapter_slots else [False]
        todo = [(bucket, lora) for bucket in sorted(sizes or self.buckets, reverse=True) for lora in families]
        pool: Any = torch.cuda.graph_pool_handle()
        for done, (bucket, lora) in enumerate(todo):
            progress("Capturing CUDA graphs", done, len(todo))
            self._graphs[bucket, lora] = self._capture(bucket, lora, pool)
        progress("Capturing CUDA graphs", len(todo), len(todo))

    def _capture(self, bucket: int, lora: bool, pool: Any) -> _Captured:
        empty = StepPlan(0, [], [])
        layout = self._layout(empty, bucket)
        self.inputs.fill(0, self._columns(empty, bucket, {}), [])
        for _ in range(2):  # kernels are compiled, workspaces are allocated
            self.model.begin_step(0, lora=lora, eager=False)
            self.model.plan(layout)
            self._run(bucket, layout, self._lora(bucket, []) if lora else None)
            torch.cuda.current_stream(self._device).synchronize()
            self.model.check()
        graph = torch.cuda.CUDAGraph()
        self.model.begin_step(0, lora=lora, eager=False)
        stream = torch.cuda.current_stream(self._device)
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            trace = self._run(bucket, layout, self._lora(bucket, []) if lora else None)
        self.model.check()
        return _Captured(graph, trace)

    def _run(self, bucket: int, layout: BatchLayout, lora: LoraBatch | None) -> Trace | None:
        i = self.inputs
        sources = i["sources"][:bucket]
        ids = torch.where(sources >= 0, self.sampled[sources.clamp(min=0)], i["ids"][:bucket])
        trace = Trace() if self._tracing else None
        hidden = self.model.run(ids, layout, lora, i["bsz"], trace)
        self.logits[:bucket].copy_(self.model.logits(hidden))
        self.sampled[:bucket].copy_(self.logits[:bucket].argmax(dim=-1))
        return trace

    def _lora(self, bucket: int, slots: list[int]) -> LoraBatch:
        """`groups` are for backends that cannot be captured; in a graph there are none, segments say it all."""
        tiles = max_tiles(bucket, self.inputs.adapter_slots)
        segments = Segments(self.inputs["order"][:bucket], self.inputs["tiles"][:tiles])
        return LoraBatch(self.inputs["slots"][:bucket], lora_groups(slots, self._device), segments)

    def _layout(self, plan: StepPlan, bucket: int) -> BatchLayout:
        padding = bucket - len(plan.rows)
        return BatchLayout(
            row_starts=list(range(bucket + 1)),
            context_lens=[row.start + 1 for row in plan.rows] + [1] * padding,
            block_tables=[*plan.block_tables, *[(self._scratch,)] * padding],
            positions=self.inputs["positions"][:bucket],
            slot_mapping=self.inputs["slot_mapping"][:bucket],
            padded=True,
        )

    def _columns(self, plan: StepPlan, bucket: int, sources: dict[str, int]) -> dict[str, list[int]]:
        padding = bucket - len(plan.rows)
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
