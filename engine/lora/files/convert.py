"""An adapter's folder in another form."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import torch

from engine.errors import UserError
from engine.lora.adapter import AdapterWeights, ExpertLora
from engine.lora.files.folder import AdapterFiles
from engine.lora.files.gguf import write_gguf
from engine.lora.files.parse import parse_adapter
from engine.lora.files.settings import read_settings
from engine.lora.files.whole import base_tables
from engine.lora.files.writer import StockModel, write_adapter
from engine.units import format_bytes
from engine.weights.open import open_model

GGUF = "gguf"


def convert(
    path: str,
    form: str,
    out: str,
    model: str | None,
    *,
    expert_scaling: str | None = None,
    expert_b_layout: str | None = None,
    opened: Callable[[int], None] = lambda num_bytes: None,
) -> str:
    """Writes the adapter of folder `path` to folder `out` as `form` (`engine.lora.files.writer.FORMS`); the line that
    says so; or, as "gguf", to the file `out`. `expert_scaling` and `expert_b_layout` as `parse_adapter` has them.
    `model`: its base; None: the one that the adapter names, if it is on this machine. UserError, also for a folder that
    is not empty."""
    target = Path(os.path.expanduser(out))
    if form != GGUF and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{out}: is not an empty folder; give a new one", "out")
    with AdapterFiles(path, opened) as files:
        base = read_settings(files).base
    known = model or base
    if not known or (model is None and not os.path.exists(os.path.expanduser(known))):
        named = f"names the base {base!r}, which is no path here" if base else "does not name its base"
        raise UserError(f"{path}: {named}: give --model, the base's folder or .gguf file", "model")
    source = open_model(known)
    config = source.config
    weights = parse_adapter(
        path,
        config,
        name=Path(path).name,
        expert_scaling=expert_scaling,
        expert_b_layout=expert_b_layout,
        tables=base_tables(source),
        opened=opened,
    )
    if form == "kt-fused" and weights.experts:
        weights = _with_all_layers(weights, config.sparse_layers)
    if form == GGUF:
        write_gguf(weights, target, config, base=base)
    else:
        write_adapter(weights, target, form, base=base, stock=StockModel.of(config))
    lines = [f"warning: {text}" for text in weights.warnings]
    return "\n".join([*lines, f"{path} ({weights.format}) -> {out} ({form}), {format_bytes(weights.num_bytes)}"])


def _with_all_layers(weights: AdapterWeights, layers: list[int]) -> AdapterWeights:
    """The fused form has every layer; absent ones become zero."""
    like = next(iter(weights.experts.values()))
    zeros = {f.name: getattr(like, f.name) for f in dataclasses.fields(ExpertLora)}
    zeros = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value for name, value in zeros.items()
    }
    experts = {layer: weights.experts.get(layer) or ExpertLora(**zeros) for layer in layers}
    return dataclasses.replace(weights, experts=experts)
