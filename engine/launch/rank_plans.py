"""The plans of other ranks, from rank 0's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.config import EngineConfig
from engine.planning.plan import EnginePlan
from engine.ranks.shard import Shard, ShardedSource
from engine.weights.open import open_model


def each_rank(plan: EnginePlan) -> Iterator[EnginePlan]:
    """For parts that are computed one after the other, on rank 0's device. Ranks without experts are left out."""
    yield plan
    for rank in range(1, plan.shard.size if plan.shard.experts else 1):
        shard = replace(plan.shard, rank=rank)
        yield replace(plan, source=_opened(plan.config, shard), shard=shard)


def _opened(config: EngineConfig, shard: Shard) -> ShardedSource:
    return ShardedSource(open_model(config.model, config.gguf), shard)


def on_rank(plan: EnginePlan, shard: Shard) -> EnginePlan:
    """A plan that rank 0 has sent, with this rank's part of the model and its GPU."""
    device = f"cuda:{shard.rank}"
    choices = {
        name: replace(choice, device=device if choice.device.startswith("cuda") else choice.device)
        for name, choice in plan.placement.choices.items()
    }
    source = _opened(plan.config, shard)
    return replace(plan, source=source, shard=shard, placement=replace(plan.placement, choices=choices))
