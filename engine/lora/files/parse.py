"""Parses an adapter folder of any supported form into `AdapterWeights`, or refuses it with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from engine.architectures.config import ModelConfig
from engine.architectures.registry import architecture_of
from engine.errors import AdapterError, ModelFileError, UserError
from engine.lora.adapter import AdapterWeights
from engine.lora.files.b_layout import B_LAYOUTS
from engine.lora.files.detect import Layout, check_places, sort_keys
from engine.lora.files.folder import AdapterFiles, refusal, shown
from engine.lora.files.formats.common import Reading, open_expert_scaling
from engine.lora.files.formats.fused3d import read_fused_3d
from engine.lora.files.formats.kt_fused import Manifest, check_beside, read_kt_fused, read_manifest
from engine.lora.files.formats.linears import read_extra_mlps, read_linears
from engine.lora.files.formats.per_expert import read_per_expert
from engine.lora.files.formats.stacked import read_stacked
from engine.lora.files.settings import EXPERT_SCALINGS, Settings, read_settings
from engine.lora.files.whole import BaseTable, check_whole


def parse_adapter(
    path: str | Path,
    config: ModelConfig,
    *,
    name: str,
    expert_scaling: str | None = None,
    expert_b_layout: str | None = None,
    max_rank: int | None = None,
    base: str | None = None,
    tables: Mapping[str, BaseTable] | None = None,
    opened: Callable[[int], None] = lambda num_bytes: None,
) -> AdapterWeights:
    """Parse the adapter in folder `path` for the base that `config` describes.

    `expert_scaling` ("alpha/r", "alpha/sqrt(r)" or "peft") and `expert_b_layout` ("rank_major" or "grouped_by_expert",
    of B on fused experts) count only where the files leave it open. `max_rank` is the largest rank that is accepted,
    None any. `base` is the base model's name or path: another one in the files is a warning. `tables`
    (`engine.lora.files.whole.base_tables`): what a stored embedding or head must equal; without them each is refused.
    `opened` gets the bytes of all weight files before one is read, and may refuse them. Tensors keep their stored
    dtype. Raises AdapterError (with `keys`) for anything that cannot be served exactly, UserError for a wrong
    `expert_scaling` or `expert_b_layout`."""
    if expert_scaling is not None and expert_scaling not in EXPERT_SCALINGS:
        raise UserError(f"expert_scaling is {expert_scaling!r}, it must be one of {EXPERT_SCALINGS}", "expert_scaling")
    if expert_b_layout is not None and expert_b_layout not in B_LAYOUTS:
        raise UserError(f"expert_b_layout is {expert_b_layout!r}, it must be one of {B_LAYOUTS}", "expert_b_layout")
    try:
        with AdapterFiles(path, opened) as files:
            return _parse(files, config, name, expert_scaling, expert_b_layout, max_rank, base, tables or {})
    except (AdapterError, ModelFileError) as error:
        keys = error.keys if isinstance(error, AdapterError) else []
        raise AdapterError(f"adapter {name!r}: {error}", keys) from error
    except OSError as error:
        raise AdapterError(f"adapter {name!r} cannot be read: {error}") from error


def _parse(
    files: AdapterFiles,
    config: ModelConfig,
    name: str,
    expert_scaling: str | None,
    expert_b_layout: str | None,
    max_rank: int | None,
    base: str | None,
    tables: Mapping[str, BaseTable],
) -> AdapterWeights:
    config = config.of_safetensors
    refuse_full_experts(files)
    families = (architecture_of(config),)
    settings = read_settings(files, families)
    layout = sort_keys(files, families)
    check_places(layout, config)
    check_whole(layout.whole, tables)
    manifest = read_manifest(files)
    reading = Reading(config, settings, expert_scaling, expert_b_layout, max_rank, list(files.warnings))
    weights = AdapterWeights(name, format_name(layout, manifest), path=str(files.folder), warnings=reading.warnings)
    _warn_other_base(reading, manifest, base)
    if layout.kt_fused:
        weights.experts = read_kt_fused(reading, layout, manifest)
        check_beside(reading, layout, weights.experts)
        reading.warnings += manifest.warnings if manifest else []
    elif len([form for form in (layout.per_expert, layout.stacked, layout.fused_3d) if form]) > 1:
        fused = layout.fused_3d or layout.stacked
        keys = [entry.key for nested in fused.values() for h in nested.values() for entry in h.entries]
        raise refusal("expert LoRA both per expert and on fused experts, or on these in two forms", keys)
    elif layout.per_expert:
        weights.experts = read_per_expert(reading, layout.per_expert)
    elif layout.stacked:
        weights.experts = read_stacked(reading, layout.stacked)
    elif layout.fused_3d:
        weights.experts = read_fused_3d(reading, layout.fused_3d)
    weights.linears = read_linears(reading, layout.linears)
    weights.extra_mlps = read_extra_mlps(reading, layout.extra)
    if not (weights.linears or weights.experts or weights.extra_mlps):
        raise AdapterError("the files hold no tensor")
    _warn_unused(reading, layout)
    return weights


def refuse_full_experts(files: AdapterFiles) -> None:
    full = [name for name in files.names if name.startswith("kt_full_experts")]
    if full:
        raise refusal("full expert weights were trained too, the LoRA alone is not the model", full)


def format_name(layout: Layout, manifest: Manifest | None) -> str:
    """The form in one word, as `AdapterWeights.format` and `adapters inspect` show it."""
    if layout.kt_fused:
        form = "kt-fused" if manifest else "kt-fused-no-manifest"
    elif layout.per_expert:
        form = "peft-per-expert" if layout.prefixed else "peft-per-expert-unprefixed"
    elif layout.stacked:
        form = "peft-stacked"
    elif layout.fused_3d:
        form = "peft-fused-3d"
    else:
        form = "peft-attention"
    return f"{form}+extra-mlps" if layout.extra else form


def _warn_other_base(reading: Reading, manifest: Manifest | None, base: str | None) -> None:
    trained_on = (manifest.base if manifest else None) or reading.settings.base
    if base and trained_on and Path(trained_on).name.lower() != Path(base).name.lower():
        reading.warnings.append(f"trained on {trained_on!r}, served on {base!r}")


def _warn_unused(reading: Reading, layout: Layout) -> None:
    settings: Settings = reading.settings
    if settings.unused_patterns:
        reading.warnings.append(f"patterns that match no module: {shown(settings.unused_patterns)}")
    open_scaling = layout.per_expert and not layout.kt_fused and open_expert_scaling(settings, layout.per_expert)
    if reading.expert_scaling is not None and not open_scaling:
        reading.warnings.append(f"expert_scaling {reading.expert_scaling!r} was not needed: the files settle it")
    open_layout = layout.fused_3d and settings.open_layout
    if reading.expert_b_layout is not None and not open_layout:
        reading.warnings.append(f"expert_b_layout {reading.expert_b_layout!r} was not needed: the files settle it")
