"""PEFT `target_parameters` on fused 3-D experts (form E).

A module may hold two wrapped parameters, one inside the other, so a key does not tell gate_up from down: shapes do.
With E experts, A is [E r, in] with the expert slowest and B is [out, E r] with the expert fastest, or slowest in
Unsloth's adapters (`engine.lora.files.b_layout`). PEFT before 0.19
took in and out the other way round, so that A and B change their roles, but for parameters that have inputs before
outputs.
"""

from __future__ import annotations

import re

from engine.lora.adapter import ExpertLora
from engine.lora.files.b_layout import GROUPED, RANK_MAJOR
from engine.lora.files.detect import Halves
from engine.lora.files.folder import refusal
from engine.lora.files.formats.common import (
    Reading,
    Stack,
    assemble,
    missing,
    refuse_by_turns,
    require_rank,
    split_gate_up,
)
from engine.lora.files.settings import FUSED_PARAMETERS, scaling

Layers = dict[int, dict[str, Halves]]


def read_fused_3d(reading: Reading, layers: Layers) -> dict[int, ExpertLora]:
    """Experts by layer. The A that gate_up shares becomes gate's and up's; block-diagonal gate|up is taken apart."""
    swapped = _orientation(reading, layers)
    absent = [layer for layer in reading.config.sparse_layers if layer not in layers]
    if absent:
        reading.warnings.append(f"{missing(absent)}: no expert LoRA, taken as zero")
    result = {}
    for layer, nested in sorted(layers.items()):
        parameters = _assign(reading, nested, swapped)
        stacks: dict[str, Stack] = {}
        for parameter, halves in parameters.items():
            stacks.update(_read(reading, f"model.layers.{layer}.mlp.experts.{parameter}", halves, swapped))
        lacking = [parameter for parameter in FUSED_PARAMETERS if parameter not in parameters]
        if lacking:
            reading.warnings.append(f"layer {layer}: no expert LoRA on {lacking[0]}, taken as zero")
        result[layer] = assemble(reading, stacks)
    return result


def _orientation(reading: Reading, layers: Layers) -> bool:
    """Whether in and out are swapped. Mostly one way alone fits; a square case is settled by peft_version."""
    fitting = [
        s
        for s in (False, True)[: 1 if reading.by_turns else 2]
        if all(_assign(reading, nested, s) for nested in layers.values())
    ]
    keys = [entry.key for nested in layers.values() for halves in nested.values() for entry in halves.entries]
    if not fitting:
        first = next(h for nested in layers.values() for h in nested.values())
        shapes = " and ".join(str(list(entry.shape)) for entry in first.entries)
        raise refusal(f"fused expert LoRA that does not fit the base, such as {shapes}", keys)
    if len(fitting) == 1:
        return fitting[0]
    version = re.match(r"(\d+)\.(\d+)", reading.settings.peft_version or "")
    if version is None:
        raise refusal("fused expert LoRA fits the base in two ways and peft_version does not say which", keys)
    return (int(version[1]), int(version[2])) < (0, 19)


def _assign(reading: Reading, nested: dict[str, Halves], swapped: bool) -> dict[str, Halves]:
    """Which parameter each key's tensors belong to; empty if they do not fit."""
    hidden, intermediate = reading.config.hidden_size, reading.config.moe_intermediate_size
    sizes = {(hidden, 2 * intermediate): "gate_up_proj", (intermediate, hidden): "down_proj"}
    found: dict[str, Halves] = {}
    for halves in nested.values():
        a, b = halves.both
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            return {}
        if a.shape[0] == 0 or a.shape[0] % reading.config.num_experts:
            return {}
        size = (b.shape[0], a.shape[1]) if swapped else (a.shape[1], b.shape[0])
        parameter = sizes.get(size)
        if parameter is None or parameter in found:
            return {}
        found[parameter] = halves
    return found


def _read(reading: Reading, module: str, halves: Halves, swapped: bool) -> dict[str, Stack]:
    entry_a, entry_b = halves.both
    keys = [entry_a.key, entry_b.key]
    experts = reading.config.num_experts
    rank = entry_a.shape[0] // experts
    expected, alpha = reading.settings.of(module)
    require_rank(rank, expected, "adapter_config.json", keys)
    scale = scaling(alpha, rank, reading.linear_scaling)
    a = entry_a.read().reshape(experts, rank, -1)
    if _layout(reading, module.rpartition(".")[2], keys) == GROUPED:
        refuse_by_turns(reading, keys)
        b = entry_b.read().reshape(-1, experts, rank).transpose(0, 1)
    else:
        b = entry_b.read().reshape(-1, rank, experts).permute(2, 0, 1)
    if swapped:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    if module.endswith("down_proj"):
        reading.check_rank(rank, keys)
        return {"down": Stack(a, b, scale)}
    gate, up = split_gate_up(a, b, scale, by_turns=reading.by_turns)
    reading.check_rank(gate.rank, keys)
    return {"gate": gate, "up": up}


def _layout(reading: Reading, parameter: str, keys: list[str]) -> str:
    layout = reading.settings.layout(parameter) or reading.expert_b_layout
    if layout is None:
        raise refusal(
            "LoRA on fused experts that Unsloth trained, without lora_B_layout: the files do not tell the order of "
            f"lora_B; give expert_b_layout: {GROUPED!r}, as its releases before that key trained, or {RANK_MAJOR!r}, "
            "as PEFT does",
            keys,
        )
    return layout
