"""One LoRA pair per expert and projection, under PEFT keys (forms B and D)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.lora.adapter import ExpertLora
from engine.lora.files.detect import GATE_UP, PROJECTIONS, Halves
from engine.lora.files.folder import NOT_FINITE, Entry, finite, refusal
from engine.lora.files.formats.common import (
    Reading,
    Stack,
    assemble,
    check_pair,
    expert_module,
    expert_scaling_of_peft_keys,
    missing,
    require_rank,
)
from engine.lora.files.settings import PEFT, scaling


@dataclass(frozen=True)
class _Pair:
    a: Entry
    b: Entry
    rank: int
    scale: float


def read_per_expert(reading: Reading, layers: dict[int, dict[int, dict[str, Halves]]]) -> dict[int, ExpertLora]:
    """Stack each layer's experts; ranks are padded to the layer's largest, absent experts are zero."""
    kind = expert_scaling_of_peft_keys(reading, layers)
    absent = [layer for layer in reading.config.sparse_layers if layer not in layers]
    if absent:
        reading.warnings.append(f"{missing(absent)}: no expert LoRA, taken as zero")
    holes: dict[int, int] = {}
    result = {}
    for layer, experts in sorted(layers.items()):
        pairs = {
            projection: {
                expert: _pair(reading, layer, expert, projection, halves[projection], kind)
                for expert, halves in sorted(experts.items())
                if projection in halves
            }
            for projection in PROJECTIONS
        }
        holes[layer] = sum(reading.config.num_experts - len(by_expert) for by_expert in pairs.values())
        _check_stacked(reading, layer, [*pairs["gate"].values(), *pairs["up"].values()])
        stacks = {name: _stack(reading, name, by_expert) for name, by_expert in pairs.items() if by_expert}
        result[layer] = assemble(reading, stacks)
    incomplete = [layer for layer, count in holes.items() if count]
    if incomplete:
        total = sum(holes.values())
        reading.warnings.append(f"{missing(incomplete)}: {total} expert projections have no LoRA, taken as zero")
    return result


def _check_stacked(reading: Reading, layer: int, pairs: list[_Pair]) -> None:
    """PEFT stacks gate and up at twice the rank; patterns may be for what it makes of them. AdapterError if they say
    another rank or scale than the keys per expert."""
    settings, module = reading.settings, f"model.layers.{layer}.mlp.experts.{GATE_UP}_proj"
    rank, alpha = settings.of(module)
    named = [key for patterns in (settings.rank_pattern, settings.alpha_pattern) for key in patterns]
    if settings.match(named, module) is None:
        return
    for pair in pairs:
        scale = scaling(alpha, rank, reading.linear_scaling)
        if rank != 2 * pair.rank or not math.isclose(scale, pair.scale, rel_tol=1e-6):
            raise refusal(
                f"patterns of experts.{GATE_UP}_proj give rank {rank} and scale {scale:g}, the keys per expert "
                f"rank {pair.rank} (twice that is expected) and scale {pair.scale:g}",
                [pair.a.key, pair.b.key],
            )


def _pair(reading: Reading, layer: int, expert: int, projection: str, halves: Halves, kind: str) -> _Pair:
    a, b = halves.both
    rank = check_pair(a, b, *reading.expert_sizes(projection))
    reading.check_rank(rank, [a.key])
    expected, alpha = reading.settings.of(expert_module(layer, expert, projection))
    require_rank(rank, expected, "adapter_config.json", [a.key, b.key])
    if kind == PEFT:
        return _Pair(a, b, rank, scaling(alpha, rank, reading.linear_scaling))
    return _Pair(a, b, rank, scaling(reading.settings.alpha, rank, kind))


def _stack(reading: Reading, projection: str, pairs: dict[int, _Pair]) -> Stack:
    scales = {pair.scale for pair in pairs.values()}
    fold = len(scales) > 1
    experts, rank = reading.config.num_experts, max(pair.rank for pair in pairs.values())
    size_in, size_out = reading.expert_sizes(projection)
    a = torch.zeros(experts, rank, size_in, dtype=_common_dtype([pair.a for pair in pairs.values()]))
    b_dtype = torch.float32 if fold else _common_dtype([pair.b for pair in pairs.values()])
    b = torch.zeros(experts, size_out, rank, dtype=b_dtype)
    for expert, pair in pairs.items():
        a[expert, : pair.rank] = pair.a.load()
        b[expert, :, : pair.rank] = pair.b.load().float() * pair.scale if fold else pair.b.load()
    if not finite(a) or not finite(b):
        bad = [entry.key for pair in pairs.values() for entry in (pair.a, pair.b) if not finite(entry.load())]
        raise refusal(NOT_FINITE, bad)
    return Stack(a, b, 1.0 if fold else scales.pop())


def _common_dtype(entries: list[Entry]) -> torch.dtype:
    dtype = entries[0].dtype
    for entry in entries:
        dtype = torch.promote_types(dtype, entry.dtype)
    return dtype
