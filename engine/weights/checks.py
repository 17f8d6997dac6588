"""Whole-file checks: what the model needs against what the files hold. Torch-free; reads no weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from engine.architectures.config import ModelConfig
from engine.errors import ModelFileError, UserError
from engine.files.gguf.types import READABLE

_SHOWN = 8
_VISION = ("model.visual.", "visual.", "model.vision_tower.", "vision_tower.", "multi_modal_projector.",
           "model.multi_modal_projector.", "mm_projector.")  # fmt: skip


class Found(NamedTuple):
    """A tensor in a file: C-order shape, type by GGML name."""

    shape: tuple[int, ...]
    type: str
    path: Path


def with_mtp(names: Iterable[str], config: ModelConfig, where: Path, gguf: bool = False) -> ModelConfig:
    """The configuration with the layer of multi-token prediction; UserError if the files have none."""
    prefix = "" if config.mtp is None else config.mtp.part.gguf if gguf else config.mtp.part.prefix
    if prefix and any(name.startswith(prefix) for name in names):
        return config.with_mtp
    other = "--speculate suffix:K or ngram:K makes drafts without one"
    if config.mtp is None:
        why = f"{config.architecture} models like this one have no layer of multi-token prediction that can be served"
    else:
        why = f"the layer of multi-token prediction is not in the files (no tensor {prefix}*)"
    raise UserError(f"{where}: {why}; {other}", "speculate")


def without_left_out(names: Iterable[str], config: ModelConfig, gguf: bool = False) -> tuple[list[str], list[str]]:
    """Names of the tensors that are read, and a line on each part of the file that is not."""
    prefixes = {(part.gguf if gguf else part.prefix): part.what for part in config.left_out}
    prefixes |= {} if gguf else dict.fromkeys(_VISION, "the vision tower")
    kept: list[str] = []
    counts: Counter[str] = Counter()
    for name in names:
        what = next((what for prefix, what in prefixes.items() if prefix and name.startswith(prefix)), None)
        if what is None:
            kept.append(name)
        else:
            counts[what] += 1
    return kept, [f"{what} is left out: {count} tensors are not read" for what, count in counts.items()]


def refuse_types(found: Mapping[str, Found]) -> None:
    """Refuse the first tensor of a type that cannot be read."""
    for name, tensor in found.items():
        if tensor.type not in READABLE:
            raise ModelFileError(f"{tensor.path}: tensor {name} has type {tensor.type}, which cannot be read", "model")


def require(name: str, shape: tuple[int, ...], found: Mapping[str, Found], where: Path) -> None:
    """Refuse a tensor that is missing or has another shape."""
    tensor = found.get(name)
    if tensor is None:
        raise ModelFileError(f"{where}: tensor {name} {list(shape)} is missing", "model")
    if tensor.shape != shape:
        raise ModelFileError(
            f"{tensor.path}: tensor {name} has shape {list(tensor.shape)}; the configuration needs {list(shape)}",
            "model",
        )


def refuse_extra(names: Iterable[str], where: Path) -> None:
    """Refuse tensors that nothing would use: leaving them out would change the model silently."""
    extra = sorted(names)
    if extra:
        shown = ", ".join(extra[:_SHOWN]) + (f" and {len(extra) - _SHOWN} more" if len(extra) > _SHOWN else "")
        raise ModelFileError(f"{where}: tensors that the configuration does not account for: {shown}", "model")
