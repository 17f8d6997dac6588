"""What an engine does at this moment, for people who watch it."""

from __future__ import annotations

import time

from engine.lora.adapters import Adapters
from engine.messages import Live, LiveRow
from engine.steps.base import Model
from scheduler.request import Request
from scheduler.scheduler import Scheduler

_SERVICE = "tenant_service/"


def live(scheduler: Scheduler, adapters: Adapters, model: Model) -> Live:
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
