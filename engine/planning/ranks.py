"""How a model is divided over ranks (--tensor-parallel), and what of a machine each of them has."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from engine.config import EngineConfig
from engine.errors import UserError
from engine.experts.gpu.layout import SIZE_STEP
from engine.memory.limits import Memory
from engine.planning.placement import Placement
from engine.ranks.shard import WHOLE, Shard, ShardedSource
from engine.weights.store import WeightSource
from native.topology import cpu_quota
from rules import Machine

_ANY_SIZE = {"reference", "flashinfer"}  # backends that need no multiples of SIZE_STEP


def divide(
    config: EngineConfig, source: WeightSource, placement: Placement, machine: Machine
) -> tuple[WeightSource, Shard]:
    """Rank 0's part of a model. UserError if the model, the machine or other settings do not allow it."""
    size = config.tensor_parallel
    if size == 1:
        return source, WHOLE
    if config.deterministic:
        raise UserError(
            f"--deterministic with --tensor-parallel {size}: sums over ranks depend on the rows of a step; leave one "
            "of them out",
            "tensor_parallel",
        )
    if placement.device != "cpu":
        if size > machine.gpu_count:
            raise UserError(
                f"--tensor-parallel {size}: this machine has {machine.gpu_count} GPUs, a rank needs one; allowed are "
                f"1 to {machine.gpu_count}",
                "tensor_parallel",
            )
        if placement.device not in ("cuda", "cuda:0"):
            raise UserError(
                f"--tensor-parallel {size}: the rules place the model on {placement.device}; ranks take the GPUs from "
                "cuda:0 on, write cuda",
                "tensor_parallel",
            )
    used = {b for suffix in (".mlp.experts", "_proj", ".self_attn") for b in placement.used(suffix)}
    step = 1 if used <= _ANY_SIZE else SIZE_STEP
    experts = divides_experts(placement) and source.config.experts is not None
    if not (experts and config.expert_parallel):
        try:
            return _part(source, Shard(0, size, divides_experts(placement)), step)
        except UserError as error:
            if not experts:
                raise
            refused = error
    try:
        return _part(source, Shard(0, size, whole_experts=True), step)
    except UserError:
        if config.expert_parallel:
            raise
        raise refused from None


def _part(source: WeightSource, shard: Shard, step: int) -> tuple[WeightSource, Shard]:
    sharded = ShardedSource(source, shard, step)
    sharded.check()
    return sharded, shard


def divides_experts(placement: Placement) -> bool:
    """Not those that a pool of CPU threads computes beside the GPUs: they are one machine's, and rank 0's."""
    used = set(placement.used(".mlp.experts"))
    return used <= ({"reference", "native"} if placement.device == "cpu" else {"reference", "gpu"})


def ranks_cpu(size: int, placement: Placement, memory: Memory) -> Memory:
    """What rank 0 may take of host memory: all of it beside GPUs, where it has all that lies there."""
    if placement.device != "cpu" or size == 1:
        return memory
    return replace(memory, free_bytes=memory.free_bytes // size, limit_bytes=memory.limit_bytes // size)


def ranks_gpu(size: int, placement: Placement, memory_of: Callable[[str], Memory]) -> Memory | None:
    """Rank 0's GPU, with what is free on the one that has least: all have parts of the same size."""
    if placement.device == "cpu":
        return None
    first = memory_of(placement.device)
    free = [memory_of(f"cuda:{rank}").free_bytes for rank in range(1, size)]
    return replace(first, free_bytes=min([first.free_bytes, *free]))


def ranks_threads(size: int, placement: Placement, asked: int | None) -> int | None:
    """Threads of a rank's pool; None: it chooses."""
    if asked is not None or size == 1 or placement.device != "cpu":
        return asked
    cpus = len(os.sched_getaffinity(0))
    return max(1, min(cpus, cpu_quota() or cpus) // size)


def rank_lines(shard: Shard, placement: Placement) -> list[str]:
    """What is printed at start of how the model is divided; nothing for one rank."""
    if shard.size == 1:
        return []
    where = "GPUs" if placement.device != "cpu" else "processes on this CPU, slower than one (to try what several do)"
    what = "attention, projections and experts are divided"
    if shard.whole_experts:
        what = "attention and projections are divided, each has some of the experts whole"
    elif not shard.experts:
        what = "attention and projections are divided, rank 0 computes the experts"
    return [f"tensor parallel: {shard.size} {where}; {what}; the memory plan is that of rank 0"]
