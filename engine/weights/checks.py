"""Whole-file checks: what the model needs against what the files hold. Torch-free; reads no weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from engine.errors import ModelFileError
from engine.files.gguf.types import READABLE

_SHOWN = 8


class Found(NamedTuple):
    """A tensor in a file: C-order shape, type by GGML name."""

    shape: tuple[int, ...]
    type: str
    path: Path


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
