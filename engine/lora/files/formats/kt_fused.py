"""fused_expert_lora.safetensors and its manifest (forms A and A')."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from engine.errors import AdapterError
from engine.files.regular import read_at
from engine.lora.adapter import ExpertLora
from engine.lora.files.detect import PROJECTIONS, Halves, Layout
from engine.lora.files.folder import (
    ADAPTER_FILES,
    CONFIG_FILE,
    EXTRA_FILE,
    FUSED_FILE,
    MANIFEST_FILE,
    AdapterFiles,
    brief,
    refusal,
    shown,
)
from engine.lora.files.formats.common import Reading, Stack, assemble, missing, require_rank
from engine.lora.files.formats.per_expert import read_per_expert
from engine.lora.files.settings import ALPHAS, is_alpha, read_json

_CHUNK = 1 << 20
_DTYPE_NAMES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


@dataclass(frozen=True)
class Manifest:
    rank: int
    alpha: float
    base: str | None
    warnings: list[str]


def read_manifest(files: AdapterFiles) -> Manifest | None:
    """Check the manifest against the folder: every file's size and SHA-256, every fused tensor's shape and dtype.
    None if the folder has no manifest."""
    if MANIFEST_FILE not in files.names:
        return None
    content = read_json(files, MANIFEST_FILE)
    if content.get("version") != 1:
        raise _bad(f"version is {brief(content.get('version'))}, only 1 is known")
    if content.get("status") != "ready":
        raise _bad(f"status is {brief(content.get('status'))}, not 'ready': the trainer did not finish writing")
    artifacts = _object(content, "artifacts")
    for name, record in artifacts.items():
        _check_artifact(files, name, record)
    present = {name for name in (*ADAPTER_FILES, FUSED_FILE, EXTRA_FILE, CONFIG_FILE) if name in files.names}
    unlisted = sorted(present - set(artifacts))
    if unlisted or FUSED_FILE not in artifacts:
        raise refusal(f"{MANIFEST_FILE} does not list", unlisted or [FUSED_FILE])
    _check_tensors(files, artifacts[FUSED_FILE])
    lora = _object(content, "lora")
    rank, alpha = lora.get("rank"), lora.get("alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank <= 0:
        raise _bad(f"lora.rank is {brief(rank)}, it must be an integer > 0")
    if not is_alpha(alpha):
        raise _bad(f"lora.alpha is {brief(alpha)}, it must be {ALPHAS}")
    base = content.get("base")
    base_name = base.get("model_name_or_path") if isinstance(base, dict) else None
    weights = content.get("expert_weight_format", "bf16")
    warnings = [] if weights == "bf16" else [f"trained over {shown([str(weights)])} base experts"]
    return Manifest(rank, float(alpha), base_name[:200] if isinstance(base_name, str) else None, warnings)


def read_kt_fused(reading: Reading, layout: Layout, manifest: Manifest | None) -> dict[int, ExpertLora]:
    """Experts by layer, scaled by alpha / r whatever use_rslora says: so this trainer does."""
    sparse, there = reading.config.sparse_layers, sorted(layout.kt_fused)
    absent = [layer for layer in sparse if layer not in layout.kt_fused]
    if absent and manifest is not None:
        raise AdapterError(f"{FUSED_FILE} lacks {missing(absent)}, which the base has")
    if absent:
        reading.warnings.append(f"{missing(absent)}: no expert LoRA, taken as zero")
    settings = reading.settings
    if manifest is None:
        _refuse_expert_patterns(reading)
    result, ranks = {}, set()
    for layer in there:
        stacks = {
            projection: _stack(reading, projection, halves, settings.alpha if manifest is None else manifest.alpha)
            for projection, halves in layout.kt_fused[layer].items()
        }
        lacking = [projection for projection in PROJECTIONS if projection not in stacks]
        if lacking:
            reading.warnings.append(f"layer {layer}: no expert LoRA on {', '.join(lacking)}, taken as zero")
        for projection, stack in stacks.items():
            ranks.add(stack.rank)
            if manifest is not None:
                keys = [entry.key for entry in layout.kt_fused[layer][projection].entries]
                require_rank(stack.rank, manifest.rank, MANIFEST_FILE, keys)
        result[layer] = assemble(reading, stacks)
    if manifest is None and ranks != {settings.rank}:
        reading.warnings.append(f"experts have rank {sorted(ranks)}, {CONFIG_FILE} says {settings.rank}")
    return result


def check_beside(reading: Reading, layout: Layout, fused: dict[int, ExpertLora]) -> None:
    """Per-expert keys beside the fused file: left over from training if each B is zero, a copy for PEFT if they say the
    same, else a contradiction."""
    halves = [h for _, h in layout.expert_halves()]
    live = [entry.key for h in halves for entry in h.entries if entry is h.b and bool(entry.read().any())]
    if live:
        copies = {} if layout.stacked or layout.fused_3d else read_per_expert(reading, layout.per_expert)
        if copies.keys() != fused.keys() or not all(_same(copies[layer], fused[layer]) for layer in fused):
            raise refusal(f"expert LoRA that is neither zero nor the same beside {FUSED_FILE}", live)
    elif halves:
        reading.warnings.append(f"{2 * len(halves)} stale expert tensors beside {FUSED_FILE} are all zero and ignored")


def _same(one: ExpertLora, other: ExpertLora) -> bool:
    values = ((getattr(lora, field.name) for lora in (one, other)) for field in fields(ExpertLora))
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in values)


def _stack(reading: Reading, projection: str, halves: Halves, alpha: float) -> Stack:
    a, b = halves.both
    size_in, size_out = reading.expert_sizes(projection)
    experts = reading.config.num_experts
    rank = a.shape[1] if len(a.shape) == 3 else 0
    if a.shape != (experts, rank, size_in) or b.shape != (experts, size_out, rank) or rank == 0:
        raise refusal(
            f"shapes {list(a.shape)} and {list(b.shape)} do not fit the base: "
            f"[{experts}, r, {size_in}] and [{experts}, {size_out}, r]",
            [a.key, b.key],
        )
    reading.check_rank(rank, [a.key])
    return Stack(a.read(), b.read(), alpha / rank)


def _refuse_expert_patterns(reading: Reading) -> None:
    names = [f"model.layers.0.mlp.experts.0.{projection}_proj" for projection in PROJECTIONS]
    patterns = {**reading.settings.rank_pattern, **reading.settings.alpha_pattern}
    hit = sorted({key for name in names if (key := reading.settings.match(patterns, name)) is not None})
    if hit:
        raise refusal(f"patterns that match experts, in an adapter with {FUSED_FILE} and no manifest", hit)


def _check_artifact(files: AdapterFiles, name: str, record: object) -> None:
    if name != Path(name).name or not isinstance(record, dict):
        raise _bad(f"the artifact {brief(name)} is no file of this folder with size and sha256")
    if name not in files.names:
        raise refusal(f"{MANIFEST_FILE} lists a file that is not there", [name])
    file = files.open(name)
    size = os.fstat(file.fileno()).st_size
    if size != record.get("size"):
        raise refusal(f"size {size} bytes, but {MANIFEST_FILE} says {brief(record.get('size'))}", [name])
    digest = hashlib.sha256()
    for start in range(0, size, _CHUNK):
        digest.update(read_at(file.fileno(), files.folder / name, start, min(_CHUNK, size - start)))
    if digest.hexdigest() != record.get("sha256"):
        raise refusal(f"SHA-256 differs from {MANIFEST_FILE}: the file was changed", [name])


def _check_tensors(files: AdapterFiles, record: dict[str, Any]) -> None:
    listed = record.get("tensors")
    fused = files.fused or {}
    if not isinstance(listed, dict):
        raise _bad(f"artifacts[{FUSED_FILE!r}] has no tensors")
    if record.get("tensor_count", len(listed)) != len(listed):
        raise _bad(f"tensor_count is {brief(record['tensor_count'])}, but {len(listed)} tensors are listed")
    wrong = sorted(set(listed) ^ set(fused))
    if wrong:
        raise refusal(f"tensors in {MANIFEST_FILE} or in {FUSED_FILE}, but not in both", wrong)
    wrong = [
        key
        for key, entry in fused.items()
        if listed[key] != {"shape": list(entry.shape), "dtype": _DTYPE_NAMES[str(entry.dtype)]}
    ]
    if wrong:
        raise refusal(f"shape or dtype differs from {MANIFEST_FILE}", wrong)


def _object(content: dict[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key)
    if not isinstance(value, dict):
        raise _bad(f"{key} must be an object")
    return value


def _bad(message: str) -> AdapterError:
    return AdapterError(f"{MANIFEST_FILE}: {message}", [MANIFEST_FILE])
