"""What an engine does at this moment, for people who watch it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.lora.adapters import Adapters
from engine.messages import Live, LiveRow
from engine.steps.base import Model
from scheduler.request import Request
from scheduler.scheduler import Scheduler

_SERVICE = "tenant_service/"


@dataclass
class TouchedTotals:
    """Distinct experts of a layer in a step, summed over the `layers` of all steps whose experts are counted."""

    experts: int = 0
    layers: int = 0

    def add(self, by_layer: Mapping[int, int]) -> int | None:
        """A step's. Returns their sum; None if none of its layers is counted."""
        if not by_layer:
            return None
        experts = sum(by_layer.values())
        self.experts += experts
        self.layers += len(by_layer)
        return experts


def engine_stats(
    scheduler: Scheduler, adapters: Adapters, model: Model, read_bandwidth: float | None
) -> dict[str, Any]:
    """What /metrics is made of: numbers, and names of adapters by what they do."""
    names = {info.uid: info.name for info in adapters.infos()}
    running = {request.adapter.uid for request in scheduler.running}
    waiting = {request.adapter.uid for request in scheduler.requests()} - running
    stats: dict[str, Any] = {
        **scheduler.stats(),
        **adapters.stats(),
        "running_adapters": sorted(names[uid] for uid in running if uid in names),
        "waiting_adapters": sorted(names[uid] for uid in waiting if uid in names),
    }
    if counters := model.expert_counters:
        stats["expert_read_bytes"] = sum(each.weight_bytes_read() for each in counters)
    for places in model.expert_places:
        for device, size in places.num_bytes().items():
            stats[f"expert_bytes/{device}"] = stats.get(f"expert_bytes/{device}", 0) + size
        if places.choices is not None:
            choices, hits = places.choices()
            stats["expert_choices"] = stats.get("expert_choices", 0) + choices
            stats["expert_gpu_hits"] = stats.get("expert_gpu_hits", 0) + hits
    if read_bandwidth is not None:
        stats["memory_read_bandwidth"] = read_bandwidth
    return stats


def live(
    scheduler: Scheduler, adapters: Adapters, model: Model, read_bandwidth: float | None, touched: TouchedTotals
) -> Live:
    """Reads counters that are kept anyway; to be called between steps."""
    stats = scheduler.stats()
    names = {info.uid: info.name for info in adapters.infos()}
    counters = model.expert_counters
    return Live(
        time_s=time.monotonic(),
        waiting=int(stats["waiting"]),
        steps=int(stats["steps"]),
        prefill_tokens=int(stats["prefill_tokens"]),
        decode_tokens=int(stats["decode_tokens"]),
        block_tokens=scheduler.config.block_size,
        blocks_total=int(stats["blocks_total"]),
        blocks_used=int(stats["blocks_used"]),
        blocks_cached=int(stats["blocks_cached"]),
        rows=[_row(request, names) for request in scheduler.running],
        tenant_service={key.removeprefix(_SERVICE): value for key, value in stats.items() if key.startswith(_SERVICE)},
        weight_bytes_read=sum(each.weight_bytes_read() for each in counters) if counters else None,
        read_bandwidth=read_bandwidth,
        experts_touched=touched.experts,
        expert_layers=touched.layers,
        expert_choices={layer: counts for each in counters for layer, counts in each.choices().items()},
    )


def _row(request: Request, names: dict[int, str]) -> LiveRow:
    uid = request.adapter.uid
    return LiveRow(
        request_id=request.request_id,
        tenant=request.tenant,
        adapter=names.get(uid, f"unloaded adapter {uid}") if uid else None,
        prompt_tokens=len(request.prompt),
        cached_tokens=request.num_cached,
        computed_tokens=request.num_computed,
        output_tokens=len(request.output),
        max_tokens=request.sampling.max_tokens,
        blocks=len(request.blocks),
    )
