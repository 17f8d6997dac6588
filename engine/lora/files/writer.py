"""Writes an adapter as PEFT's keys per expert, alone or beside KT's fused files: what `parse` and other programs read.
Of experts whose gate and up lie by turns, PEFT would drop such keys: they are written as LoRA on whole parameters.

PEFT knows nothing of the fused files: a folder whose experts were there alone would load in it without them, and
without a word. So the keys per expert are in every folder.

Whatever ends the process, a power cut included, the folder holds the old adapter, or the new one, or none that loads:
all files are first written beside their names, then adapter_config.json, without which nobody reads the folder, goes
first and comes last.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file

from engine.architectures.config import ModelConfig
from engine.architectures.registry import architecture_of
from engine.errors import UserError
from engine.lora.adapter import AdapterWeights, ExpertLora, LoraPair
from engine.lora.files.detect import GATE_UP, PROJECTIONS
from engine.lora.files.folder import ADAPTER_FILES, CONFIG_FILE, EXTRA_FILE, FUSED_FILE, MANIFEST_FILE

FORMS = ("peft", "kt-fused")
_PREFIX = "base_model.model."
_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_MISTAKEN = ("gate", "router", "gate_proj", "up_proj", "down_proj")  # names that PEFT takes for others, or no linear
_EXPERT_NAMES = tuple(f"{name}_proj" for name in PROJECTIONS)
_MODEL_FILE = ADAPTER_FILES[0]

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class StockModel:
    """What PEFT goes by in transformers' model of the base. `stored`: what its family's files call a module
    (`Architecture.stored`). `by_turns`: it holds the rows of an expert's gate and up by turns (`Sparse.interleaved`).
    `plain_mlps`: projections of dense layers or shared experts have the names of experts' projections."""

    stored: Callable[[str], str] = str
    by_turns: bool = False
    plain_mlps: bool = False

    @staticmethod
    def of(config: ModelConfig) -> StockModel:
        names = {module.name for layer in range(config.num_hidden_layers) for module in config.modules(layer)}
        by_turns = config.experts is not None and config.experts.interleaved
        return StockModel(architecture_of(config).stored, by_turns, has_plain_mlps(names))


def has_plain_mlps(modules: Iterable[str]) -> bool:
    return any(name.endswith(_EXPERT_NAMES) and ".experts." not in f".{name}" for name in modules)


def write_adapter(
    weights: AdapterWeights,
    folder: Path,
    form: str,
    *,
    base: str | None = None,
    stock: StockModel = StockModel(),
) -> None:
    """Replaces whatever adapter `folder` holds; other files stay. `base`: the base model's name or path, for the files.

    Pairs get one rank (the largest; shorter ones are padded with zeros) and one scale (theirs if they have one, else 1
    with each scale multiplied into B in float32), so the files need no patterns. UserError for extra MLPs, for a form
    that is not known and for a folder that cannot be written; what was there is then left as it was.
    """
    if form not in FORMS:
        raise UserError(f"the form is {form!r}; allowed are {', '.join(FORMS)}", "to")
    if weights.extra_mlps:
        raise UserError(f"{weights.path or weights.name}: extra MLPs beside the experts cannot be converted", "path")
    if form == "kt-fused" and not weights.experts:
        raise UserError(f"{weights.path or weights.name}: no LoRA on experts, nothing to fuse: use peft", "to")
    if form == "kt-fused" and stock.by_turns:
        raise UserError("kt-fused: KTransformers trains no experts whose gate and up lie by turns: use peft", "to")
    rank, scale, linears, experts = one_rank(weights)
    files = {_MODEL_FILE: _peft_keys(linears, {} if stock.by_turns else experts, stock.stored)}
    if stock.by_turns:
        files[_MODEL_FILE] |= _whole_keys(experts)
    if form == "kt-fused":
        files[FUSED_FILE] = _fused_keys(experts)
    targets = _targets(list(linears), bool(experts), rank, scale, stock)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder, files, _config(rank, scale, base) | targets, base)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"the adapter cannot be written to {folder}: {reason}", "output_dir") from error


Experts = dict[int, dict[str, LoraPair]]  # by layer and projection; a [E, r, in], b [E, out, r]


def one_rank(weights: AdapterWeights) -> tuple[int, float, dict[str, LoraPair], Experts]:
    """(rank, scale, linears, experts): all pairs at the largest rank and one scale."""
    rank = max(weights.rank, 1)
    scale = _common_scale(weights)
    linears = {name: _pair(pair, rank, scale) for name, pair in weights.linears.items()}
    return (
        rank,
        scale,
        linears,
        {layer: dict(_expert_pairs(lora, rank, scale)) for layer, lora in weights.experts.items()},
    )


def _common_scale(weights: AdapterWeights) -> float:
    scales = {pair.scale for pair in weights.linears.values()}
    for lora in weights.experts.values():
        scales |= {lora.gate_scale, lora.up_scale, lora.down_scale}
    return scales.pop() if len(scales) == 1 else 1.0


def _pair(pair: LoraPair, rank: int, scale: float) -> LoraPair:
    """Of any leading axes: a [..., r, in], b [..., out, r]."""
    short = rank - pair.a.shape[-2]
    b = pair.b if pair.scale == scale else pair.b.float() * (pair.scale / scale)
    return LoraPair(F.pad(pair.a, (0, 0, 0, short)), F.pad(b, (0, short)), scale)


def _expert_pairs(lora: ExpertLora, rank: int, scale: float) -> Iterator[tuple[str, LoraPair]]:
    yield "gate", _pair(LoraPair(lora.gate_a, lora.gate_b, lora.gate_scale), rank, scale)
    yield "up", _pair(LoraPair(lora.up_a, lora.up_b, lora.up_scale), rank, scale)
    yield "down", _pair(LoraPair(lora.down_a, lora.down_b, lora.down_scale), rank, scale)


def _peft_keys(
    linears: dict[str, LoraPair], experts: dict[int, dict[str, LoraPair]], stored: Callable[[str], str]
) -> Tensors:
    pairs = dict(linears)
    for layer, projections in experts.items():
        for name, pair in projections.items():
            for e in range(pair.a.shape[0]):
                pairs[_expert(layer, e, name)] = LoraPair(pair.a[e], pair.b[e], pair.scale)
    tensors = {}
    for module, pair in pairs.items():
        tensors[f"{_PREFIX}{stored(module)}.lora_A.weight"] = _own(pair.a)
        tensors[f"{_PREFIX}{stored(module)}.lora_B.weight"] = _own(pair.b)
    return tensors


def _whole_keys(experts: Experts) -> Tensors:
    """LoRA on experts' whole parameters, as PEFT saves it: A [E r, in] with the expert slowest, B [out, E r] with the
    expert fastest. Gate and up share one at twice the rank, block-diagonal, B's rows by turns."""
    tensors = {}
    for layer, pairs in experts.items():
        gate, up, down = (pairs[name] for name in ("gate", "up", "down"))
        both = torch.stack([F.pad(gate.b, (0, up.b.shape[2])), F.pad(up.b, (gate.b.shape[2], 0))], dim=2).flatten(1, 2)
        key = f"{_PREFIX}model.layers.{layer}.mlp.experts"
        for name, a, b in (
            (f"{key}.base_layer", torch.cat([gate.a, up.a], dim=1), both),
            (key, down.a, down.b),
        ):
            tensors[f"{name}.lora_A.weight"] = _own(a.flatten(0, 1))
            tensors[f"{name}.lora_B.weight"] = _own(b.permute(1, 2, 0).flatten(1, 2))
    return tensors


def _expert(layer: int, expert: int, projection: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"


def _fused_keys(experts: dict[int, dict[str, LoraPair]]) -> Tensors:
    return {
        f"layers.{layer}.experts.{name}_lora_{half}": _own(tensor)
        for layer, projections in experts.items()
        for name, pair in projections.items()
        for half, tensor in (("a", pair.a), ("b", pair.b))
    }


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Safetensors takes tensors that share no memory."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _targets(linears: list[str], experts: bool, rank: int, scale: float, stock: StockModel) -> dict[str, Any]:
    """What the configuration says of modules with LoRA, so that PEFT finds all of them.

    Over models whose experts are one parameter it takes names of an expert's projections, and "gate", for those of the
    routed experts and the router alone. So modules of the same names, in dense layers or shared experts, are named by
    their parameters, and so are the experts, which it knows in some families only. It stacks the keys of gate and up
    at twice the rank. Other programs look for the experts' names among the modules: they
    are there unless PEFT would take them for other modules.
    """
    stored = stock.stored
    meant = {stored(name).partition(".layers.")[2].partition(".")[2] for name in linears}
    by_parameter = sorted(name for name in meant if name.rpartition(".")[2] in _MISTAKEN)
    modules = sorted({name.rpartition(".")[2] for name in meant.difference(by_parameter)})
    parameters = [f"mlp.{name.partition('.')[2]}.weight" for name in by_parameter]
    if not experts:
        return {"target_modules": modules, "target_parameters": parameters}
    if not (by_parameter or stock.plain_mlps or stock.by_turns):
        modules += [stored(_expert(0, 0, name)).rpartition(".")[2] for name in PROJECTIONS]
    fused, both = f"experts.{GATE_UP}_proj", 2 * rank
    return {
        "target_modules": modules,
        "target_parameters": [*parameters, fused, "experts.down_proj"],
        "rank_pattern": {fused: both},
        "alpha_pattern": {fused: _number(scale * both)},
    }


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _config(rank: int, scale: float, base: str | None) -> dict[str, Any]:
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": _number(scale * rank),
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def _write(folder: Path, files: dict[str, Tensors], config: dict[str, Any], base: str | None) -> None:
    staged: dict[str, Path] = {}
    try:
        for name, tensors in files.items():
            staged[name] = folder / f".{name}.partial"
            save_file(tensors, str(staged[name]), metadata={"format": "pt"})
        staged[CONFIG_FILE] = folder / f".{CONFIG_FILE}.partial"
        staged[CONFIG_FILE].write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        if FUSED_FILE in files:
            manifest = _manifest(staged, files[FUSED_FILE], config, base)
            staged[MANIFEST_FILE] = folder / f".{MANIFEST_FILE}.partial"
            staged[MANIFEST_FILE].write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        for path in staged.values():
            _sync(path)
        (folder / CONFIG_FILE).unlink(missing_ok=True)
        for name in (*ADAPTER_FILES, FUSED_FILE, EXTRA_FILE, MANIFEST_FILE):
            (folder / name).unlink(missing_ok=True)
        _sync(folder)
        for name in sorted(staged, key=lambda name: name == CONFIG_FILE):
            _sync(folder)
            staged[name].replace(folder / name)
        _sync(folder)
    finally:
        for path in staged.values():
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _manifest(staged: dict[str, Path], fused: Tensors, config: dict[str, Any], base: str | None) -> dict[str, Any]:
    artifacts: dict[str, Any] = {}
    for name, path in staged.items():
        with path.open("rb") as file:
            artifacts[name] = {"sha256": _sha256(file), "size": path.stat().st_size}
    artifacts[FUSED_FILE] |= {
        "tensor_count": len(fused),
        "tensors": {key: {"dtype": _TYPES[t.dtype], "shape": list(t.shape)} for key, t in sorted(fused.items())},
    }
    return {
        "artifacts": artifacts,
        "base": {"model_name_or_path": base},
        "expert_weight_format": "bf16",
        "lora": {"alpha": config["lora_alpha"], "rank": config["r"]},
        "status": "ready",
        "version": 1,
    }


def _sha256(file: Any) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
