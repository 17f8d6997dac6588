"""Attention, router and dense MLPs under PEFT keys; the extra MLPs that KT trains beside the experts."""

from __future__ import annotations

from engine.architectures.config import ModelConfig
from engine.errors import AdapterError
from engine.lora.adapter import ExtraMlp, LoraPair
from engine.lora.files.detect import PROJECTIONS, Halves
from engine.lora.files.folder import Entry, refusal
from engine.lora.files.formats.common import Reading, check_pair, require_rank
from engine.lora.files.settings import scaling


def read_linears(reading: Reading, linears: dict[str, Halves]) -> dict[str, LoraPair]:
    """Each module's pair at its own rank and scale (rank_pattern, alpha_pattern and rslora are honoured)."""
    return {module: _pair(reading, module, halves) for module, halves in linears.items()}


def read_extra_mlps(reading: Reading, extra: dict[int, dict[int, dict[str, Entry]]]) -> dict[int, list[ExtraMlp]]:
    """Per layer a list of SwiGLU MLPs, numbered from 0 without a gap."""
    return {layer: _extra_layer(reading.config.hidden_size, mlps) for layer, mlps in sorted(extra.items())}


def linear_sizes(config: ModelConfig, module: str) -> tuple[int, int]:
    """(in, out) of a module the base has; AdapterError for one it has not."""
    _, _, layer, name = module.split(".", 3)
    for held in config.modules(int(layer)):
        if held.name == name:
            out, inner = held.shape
            return inner, out
    kind = "has routed experts" if config.is_sparse(int(layer)) else "is dense"
    raise AdapterError(f"{module} is LoRA on a module that is not there: layer {layer} of the base {kind}")


def _pair(reading: Reading, module: str, halves: Halves) -> LoraPair:
    a, b = halves.both
    try:
        sizes = linear_sizes(reading.config, module)
    except AdapterError as error:
        raise refusal(str(error), [a.key, b.key]) from error
    rank = check_pair(a, b, *sizes)
    reading.check_rank(rank, [a.key])
    expected, alpha = reading.settings.of(_pattern_name(reading, module))
    require_rank(rank, expected, "adapter_config.json", [a.key, b.key])
    return LoraPair(a.read(), b.read(), scaling(alpha, rank, reading.linear_scaling))


def _pattern_name(reading: Reading, module: str) -> str:
    """PEFT matches patterns with a parameter's name where the parameter was targeted, as newer routers are."""
    parameter = f"{module}.weight"
    targets, names = reading.settings.target_parameters, reading.settings.names(parameter)
    return parameter if any(f".{name}".endswith(f".{target}") for name in names for target in targets) else module


def _extra_layer(hidden: int, mlps: dict[int, dict[str, Entry]]) -> list[ExtraMlp]:
    keys = [entry.key for projections in mlps.values() for entry in projections.values()]
    if sorted(mlps) != list(range(len(mlps))):
        raise refusal(f"lora_experts are numbered {sorted(mlps)}, not from 0 without a gap", keys)
    return [_extra_mlp(hidden, mlps[index]) for index in range(len(mlps))]


def _extra_mlp(hidden: int, projections: dict[str, Entry]) -> ExtraMlp:
    keys = [entry.key for entry in projections.values()]
    if sorted(projections) != sorted(PROJECTIONS):
        raise refusal("a lora_experts MLP needs le_gate, le_up and le_down", keys)
    gate, up, down = (projections[name] for name in PROJECTIONS)
    size = gate.shape[0] if gate.shape else 0
    if gate.shape != (size, hidden) or up.shape != (size, hidden) or down.shape != (hidden, size) or size == 0:
        shapes = ", ".join(str(list(entry.shape)) for entry in (gate, up, down))
        raise refusal(f"lora_experts shapes {shapes} are not [J, {hidden}], [J, {hidden}], [{hidden}, J]", keys)
    return ExtraMlp(gate.read(), up.read(), down.read())
