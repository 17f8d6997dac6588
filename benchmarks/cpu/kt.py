"""The CPU benchmark's rows of experts alone: one layer's call beside kt_kernel's of the same precision.

Both sides get the same choices of experts and visit so many layers in turn that no cache helps. Every class and K_CFG
of kt_kernel runs in a process of its own, turn by turn with ours; the fastest of them counts, at each number of rows.
"""

from __future__ import annotations

import importlib
import itertools
import os
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.cpu.state import Run
from benchmarks.kernels.experts import choices, each, layers_beyond_cache, make_layer, make_task
from benchmarks.kernels.probe import best_s, make_pool
from benchmarks.peers.kt import KtError, KtPeer, Variant, spare_threads, variants

_native: Any = importlib.import_module("native._native")
ROWS = (1, 8, 32, 128, 512)
_CACHES = 2  # packing for kt_kernel takes seconds a layer
_TYPES = {"Q4_K_M": "Q4_K"}  # half of that mix's down projections are Q6_K, which kt_kernel's int4 is not


@dataclass
class _Pair:
    ours: list[float] = field(default_factory=list)  # seconds a call
    theirs: list[float] = field(default_factory=list)


class _Ours:
    """Our expert call over the same layers and choices; `layers` 0: enough to exceed the caches."""

    def __init__(self, run: Run, type: str, layers: int) -> None:
        shape = run.shape
        self.pool = make_pool(run.threads)
        self.shape, self.runner = shape, _native.MoeRunner(self.pool, "")
        sizes = (shape.experts, 0, shape.hidden, shape.intermediate)
        first = make_layer(self.pool, type, *sizes)
        count = layers or layers_beyond_cache(first, _CACHES)
        self.layers = [first] + [make_layer(self.pool, type, *sizes) for _ in range(count - 1)]

    def second(self, ids: list[torch.Tensor]) -> float:
        """Seconds a call, of one round after one to warm up."""
        made = [
            make_task(self.runner, layer, i, 0, self.shape.hidden)
            for layer, i in zip(itertools.cycle(self.layers), ids, strict=False)
        ]
        return best_s(self.pool, 1, each([task for task, _ in made])) / len(made)

    def bytes_of(self, ids: list[torch.Tensor]) -> float:
        """Mean weight bytes of a call: those of the distinct experts."""
        distinct = statistics.mean(float(torch.unique(i).numel()) for i in ids)
        return distinct * float(self.layers[0].num_bytes) / self.shape.experts


def kt(run: Run, mix: str) -> None:
    """One layer's experts, 1 to 512 rows."""
    run.release()
    type, shape = _TYPES.get(mix, mix), run.shape
    all_rows = ROWS[:2] if run.quick else ROWS
    ours = _Ours(run, type, 1 if run.quick else 0)
    run.measure_peaks(mix, ours.pool)
    ids = {rows: choices(rows, shape.experts, len(ours.layers), shape.top_k) for rows in all_rows}
    pairs: dict[int, dict[Variant, _Pair]] = {rows: {} for rows in all_rows}
    threads = spare_threads(len(os.sched_getaffinity(0)))
    wanted = variants(type, shape.top_k, blocks=True)
    row_end_s, missing = run.row_end_s, []
    for i, variant in enumerate(wanted):
        now = time.monotonic()
        run.row_end_s = now + (row_end_s - now) / (len(wanted) - i)
        try:
            _beside(run, variant, ours, ids, pairs, threads)
        except KtError as error:
            missing.append(f"{variant}: {error}")
    run.row_end_s = row_end_s
    if missing and not any(pairs.values()):
        raise KtError("; ".join(missing))
    run.leave_out("kt", mix, *missing)
    for rows in all_rows:
        found = pairs[rows]
        best = min(found, key=lambda variant: statistics.median(found[variant].theirs))
        pair = found[best]
        mine, theirs = statistics.median(pair.ours), statistics.median(pair.theirs)
        rate = ours.bytes_of(ids[rows]) / mine
        more: dict[str, Any] = {"us": mine * 1e6, "peer_us": theirs * 1e6, "peer_name": str(best)}
        more |= {"rows": rows, "threads": run.threads, "peer_threads": threads, "layers": len(ours.layers)}
        more["call_gb_s"] = rate / 1e9
        more["peer_all_us"] = {str(v): statistics.median(p.theirs) * 1e6 for v, p in found.items()}
        what = f"experts of a layer, {rows} row{'s' if rows > 1 else ''}"
        run.record("kt", mix, what, "rows/s", [rows / s for s in pair.ours], [rows / s for s in pair.theirs], **more)


def _beside(
    run: Run,
    variant: Variant,
    ours: _Ours,
    ids: dict[int, list[torch.Tensor]],
    pairs: dict[int, dict[Variant, _Pair]],
    threads: int,
) -> None:
    """Ours and one variant in alternating order, repetition by repetition."""
    shape = run.shape
    sizes = (shape.experts, shape.top_k, shape.hidden, shape.intermediate)
    peer = KtPeer([variant], sizes, len(ours.layers), max(ids), threads)
    found = {rows: _Pair() for rows in ids}
    try:
        for i in run.repeats(3):
            for rows, pair in found.items():
                if i % 2:
                    pair.theirs.append(peer.best_s(ids[rows], 1)[variant])
                pair.ours.append(ours.second(ids[rows]))
                if not i % 2:
                    pair.theirs.append(peer.best_s(ids[rows], 1)[variant])
    finally:
        peer.close()
    for rows, pair in found.items():
        pairs[rows][variant] = pair
