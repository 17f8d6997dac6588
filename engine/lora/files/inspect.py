"""What a person is told about an adapter before it is served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from engine.architectures.config import ModelConfig
from engine.architectures.registry import architecture_of, architectures
from engine.errors import AdapterError, ModelFileError
from engine.lora.adapter import AdapterWeights
from engine.lora.files.b_layout import B_LAYOUTS
from engine.lora.files.detect import PROJECTIONS, Halves, Layout, sort_keys
from engine.lora.files.folder import KEYS_SHOWN, TRAINER_STATE, AdapterFiles, Entry
from engine.lora.files.formats.common import open_expert_scaling
from engine.lora.files.formats.kt_fused import Manifest, read_manifest
from engine.lora.files.parse import format_name, parse_adapter, refuse_full_experts
from engine.lora.files.settings import SCALINGS, Settings, read_json, read_settings, scaling
from engine.lora.files.whole import BaseTable
from engine.units import format_bytes

_KEYS_LISTED = 20
_FORMS = {
    "kt-fused": "KT fused experts, with manifest",
    "kt-fused-no-manifest": "KT fused experts, without manifest",
    "peft-per-expert": "PEFT, one pair per expert",
    "peft-per-expert-unprefixed": "PEFT, one pair per expert, keys without base_model.model.",
    "peft-stacked": "one pair of tensors for all experts of a projection (Megatron-Bridge, NeMo)",
    "peft-fused-3d": "PEFT on fused experts (target_parameters)",
    "peft-attention": "PEFT, no experts",
}


class Described(NamedTuple):
    text: str  # several lines
    refused: bool


def describe(
    path: str | Path,
    config: ModelConfig | None,
    *,
    expert_scaling: str | None = None,
    expert_b_layout: str | None = None,
    max_rank: int | None = None,
    tables: Mapping[str, BaseTable] | None = None,
    opened: Callable[[int], None] = lambda num_bytes: None,
) -> Described:
    """What is to be said of the adapter in `path`: form, rank, scale, modules, layers, experts, bytes, warnings and
    whether the base `config` can serve it, or why not. Without `config` headers, settings and manifest are checked, but
    not the values and not the fit. `tables` and `opened` as `parse_adapter` has them. Raises nothing for what the
    folder holds: the reason is part of the text."""
    name = Path(path).name or str(path)
    lines = [f"adapter    {path}"]
    error: AdapterError | None = None
    try:
        with AdapterFiles(path, opened) as files:
            lines += _checkpoint(files)
            error = _folder(files, lines, config)
    except AdapterError as failed:
        error = failed
    except ModelFileError as failed:
        error = AdapterError(str(failed))
    except OSError as failed:
        error = AdapterError(f"cannot be read: {failed}")
    weights = None
    if error is None and config is not None:
        try:
            weights = parse_adapter(
                path,
                config,
                name=name,
                expert_scaling=expert_scaling,
                expert_b_layout=expert_b_layout,
                max_rank=max_rank,
                tables=tables,
                opened=opened,
            )
        except AdapterError as failed:
            error = failed
    text = "\n".join(dict.fromkeys([*lines, *_verdict(error, weights, config)]))  # a warning is said once
    return Described(text, error is not None)


def _folder(files: AdapterFiles, lines: list[str], config: ModelConfig | None) -> AdapterError | None:
    """Add what the folder tells; every part is read even if another is refused. The first refusal."""
    families = architectures() if config is None else (architecture_of(config),)
    errors: list[AdapterError] = []
    settings: Settings | None = None
    layout: Layout | None = None
    manifest: Manifest | None = None
    try:
        refuse_full_experts(files)
    except AdapterError as error:
        errors.append(error)
    try:
        settings = read_settings(files, families)
    except AdapterError as error:
        errors.append(error)
    try:
        layout = sort_keys(files, families)
    except AdapterError as error:
        errors.append(error)
    try:
        manifest = read_manifest(files)
    except AdapterError as error:
        errors.append(error)
    if layout is not None:
        form = format_name(layout, manifest)
        lines.append(f"format     {form}: {_FORMS[form.removesuffix('+extra-mlps')]}")
    if settings is not None:
        lines += _settings(settings, layout, manifest)
    if layout is not None:
        lines += _layout(layout)
    entries = [entry for held in (files.main, files.fused, files.extra) for entry in (held or {}).values()]
    lines.append(f"tensors    {_tensors(entries)}")
    lines += [f"warning    {text}" for text in files.warnings]
    return errors[0] if errors else None


def _checkpoint(files: AdapterFiles) -> Iterator[str]:
    if TRAINER_STATE not in files.names:
        return
    try:
        step = read_json(files, TRAINER_STATE).get("global_step")
    except AdapterError as error:
        yield f"checkpoint of a training run: {error}"
        return
    yield f"checkpoint of a training run{f', step {step}' if isinstance(step, int) else ''}"


def _settings(settings: Settings, layout: Layout | None, manifest: Manifest | None) -> Iterator[str]:
    yield f"trained on {(manifest.base if manifest else None) or settings.base or 'not said'}"
    patterns = ", ".join(
        f"{name} {values}"
        for name, values in (("rank_pattern", settings.rank_pattern), ("alpha_pattern", settings.alpha_pattern))
        if values
    )
    rule = SCALINGS[settings.rslora]
    value = scaling(settings.alpha, settings.rank, rule)
    yield f"rank       {settings.rank}, alpha {settings.alpha:g}, scaled by {rule} = {value:g}"
    if patterns:
        yield f"patterns   {patterns}"
    if manifest is not None:
        yield f"experts'   rank {manifest.rank}, alpha {manifest.alpha:g}, scaled by alpha/r (manifest)"
    elif layout is not None and layout.kt_fused:
        yield f"experts'   alpha {settings.alpha:g}, scaled by alpha/r at the tensors' rank"
    elif layout is not None and layout.fused_3d and settings.open_layout:
        yield f"experts'   order of lora_B not settled by the files: load with expert_b_layout {' or '.join(B_LAYOUTS)}"
    elif layout is not None and open_expert_scaling(settings, layout.per_expert):
        yield "experts'   scale not settled by the files: load with expert_scaling alpha/r, alpha/sqrt(r) or peft"


def _layout(layout: Layout) -> Iterator[str]:
    by_name: dict[str, list[int]] = {}
    ranks: Counter[int] = Counter()
    for module, halves in layout.linears.items():
        _, _, layer, name = module.split(".", 3)
        by_name.setdefault(name, []).append(int(layer))
        ranks[halves.both[0].shape[0] if halves.both[0].shape else 0] += 1
    same: dict[str, list[str]] = {}
    for name, layers in by_name.items():
        same.setdefault(_ranges(layers), []).append(name)
    for where, names in same.items():
        yield f"modules    {', '.join(sorted(names))}: layers {where}"
    if ranks:
        yield f"           of rank {', '.join(map(str, sorted(ranks)))}"
    for projections, experts, layers in _experts(layout):
        yield f"experts    {projections}: {experts}layers {_ranges(layers)}"
    if layout.whole:
        yield f"whole      {', '.join(layout.whole)}: must equal the base's"
    if layout.extra:
        counts = sorted({len(mlps) for mlps in layout.extra.values()})
        yield f"extra MLPs {', '.join(map(str, counts))} a layer: layers {_ranges(layout.extra)}"


def _experts(layout: Layout) -> Iterator[tuple[str, str, list[int]]]:
    """(projections, experts, layers) of layers that are alike."""
    alike: dict[tuple[str, str], list[int]] = {}
    for layer, projections in layout.kt_fused.items():
        counts = [halves.both[0].shape[0] for halves in projections.values() if halves.both[0].shape]
        alike.setdefault((_names(projections), f"{_ranges(range(max(counts, default=0)))} of "), []).append(layer)
    for layer, by_expert in layout.per_expert.items():
        names = _names({name for projections in by_expert.values() for name in projections})
        alike.setdefault((names, f"{_ranges(by_expert)} of "), []).append(layer)
    for layer, projections in layout.stacked.items():
        shapes = ", ".join(f"{name} {_shapes(halves)}" for name, halves in sorted(projections.items()))
        alike.setdefault((f"stacked {shapes}", ""), []).append(layer)
    for layer, nested in layout.fused_3d.items():
        shapes = ", ".join(_shapes(halves) for halves in nested.values())
        alike.setdefault((f"fused {shapes}", ""), []).append(layer)
    for (names, experts), layers in alike.items():
        yield names, experts, layers


def _shapes(halves: Halves) -> str:
    return " ".join(str(list(entry.shape)) for entry in halves.both)


def _names(projections: Iterable[str]) -> str:
    there = set(projections)
    return " ".join(name for name in PROJECTIONS if name in there)


def _ranges(numbers: Iterable[int]) -> str:
    """ "0-3, 5"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "none"


def _tensors(entries: list[Entry]) -> str:
    types = Counter(str(entry.dtype).removeprefix("torch.") for entry in entries)
    size = format_bytes(sum(entry.num_bytes for entry in entries))
    return f"{len(entries)}, {size} ({', '.join(f'{count} {name}' for name, count in sorted(types.items()))})"


def _verdict(error: AdapterError | None, weights: AdapterWeights | None, config: ModelConfig | None) -> Iterator[str]:
    if error is not None:
        yield f"refused    {error}"
        if len(error.keys) > KEYS_SHOWN:  # the message shows fewer
            yield from (f"           {key}" for key in error.keys[:_KEYS_LISTED])
            if len(error.keys) > _KEYS_LISTED:
                yield f"           and {len(error.keys) - _KEYS_LISTED} more"
    elif weights is not None:
        yield from (f"warning    {text}" for text in weights.warnings)
        yield f"served     yes: rank {weights.rank}, {format_bytes(weights.num_bytes)} in memory"
    elif config is None:
        yield "served     not checked against a base: give a model"
