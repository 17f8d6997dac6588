"""LoRA of all experts under one key for each projection, as Megatron-Bridge and NeMo export it.

`...mlp.experts.{gate_up,gate,up,down}_proj.lora_{A,B}.weight`: A [E, r, in], B [E, out, r]. A half that all experts
share is [1, ...], or has no such axis. gate_up's B has the rows of gate before those of up.
"""

from __future__ import annotations

import torch

from engine.lora.adapter import ExpertLora
from engine.lora.files.detect import GATE_UP, PROJECTIONS, Halves
from engine.lora.files.folder import Entry, refusal
from engine.lora.files.formats.common import (
    Reading,
    Stack,
    assemble,
    missing,
    refuse_by_turns,
    require_rank,
    split_gate_up,
)
from engine.lora.files.settings import scaling


def read_stacked(reading: Reading, layers: dict[int, dict[str, Halves]]) -> dict[int, ExpertLora]:
    """Experts by layer; projections and layers without LoRA are zero."""
    absent = [layer for layer in reading.config.sparse_layers if layer not in layers]
    if absent:
        reading.warnings.append(f"{missing(absent)}: no expert LoRA, taken as zero")
    result = {}
    for layer, projections in sorted(layers.items()):
        if GATE_UP in projections and len(projections.keys() & {"gate", "up"}):
            keys = [entry.key for name in projections if name != "down" for entry in projections[name].entries]
            raise refusal("LoRA on gate and up both together and apart", keys)
        stacks: dict[str, Stack] = {}
        for projection, halves in projections.items():
            stacks.update(_read(reading, layer, projection, halves))
        lacking = [projection for projection in PROJECTIONS if projection not in stacks]
        if lacking:
            reading.warnings.append(f"layer {layer}: no expert LoRA on {', '.join(lacking)}, taken as zero")
        result[layer] = assemble(reading, stacks)
    return result


def _read(reading: Reading, layer: int, projection: str, halves: Halves) -> dict[str, Stack]:
    entry_a, entry_b = halves.both
    keys = [entry_a.key, entry_b.key]
    experts = reading.config.num_experts
    size_in, size_out = reading.expert_sizes("gate" if projection == GATE_UP else projection)
    if projection == GATE_UP:
        refuse_by_turns(reading, keys)
        size_out *= 2
    rank = entry_a.shape[-2] if len(entry_a.shape) > 1 else 0
    fits_a = _fits(entry_a, experts, (rank, size_in))
    if not fits_a or not _fits(entry_b, experts, (size_out, rank)) or rank == 0:
        raise refusal(
            f"shapes {list(entry_a.shape)} and {list(entry_b.shape)} do not fit the base: [{experts}, r, {size_in}] "
            f"and [{experts}, {size_out}, r], or one for all experts",
            keys,
        )
    expected, alpha = reading.settings.of(f"model.layers.{layer}.mlp.experts.{projection}_proj")
    require_rank(rank, expected, "adapter_config.json", keys)
    a, b = _of_all(entry_a, experts), _of_all(entry_b, experts)
    scale = scaling(alpha, rank, reading.linear_scaling)
    if projection != GATE_UP:
        reading.check_rank(rank, keys)
        return {projection: Stack(a, b, scale)}
    gate, up = split_gate_up(a, b, scale)
    reading.check_rank(gate.rank, keys)
    return {"gate": gate, "up": up}


def _fits(entry: Entry, experts: int, shape: tuple[int, int]) -> bool:
    return entry.shape in ((experts, *shape), (1, *shape), shape)


def _of_all(entry: Entry, experts: int) -> torch.Tensor:
    """[E, ...]; a view of one where all share it."""
    values = entry.read()
    return values.expand(experts, *values.shape[-2:])
