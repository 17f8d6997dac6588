"""Open a model on disk, whatever its form."""

from __future__ import annotations

import os
from pathlib import Path

from engine.architectures.config import ModelConfig
from engine.architectures.registry import config_from_hf
from engine.errors import ModelFileError, UserError
from engine.files.gguf.file import open_gguf
from engine.files.json_file import read_json
from engine.files.regular import elsewhere
from engine.weights.gguf import GGUFSource
from engine.weights.safetensors.source import INDEX, SINGLE, SafetensorsSource
from engine.weights.store import WeightSource

ADAPTER_CONFIG = "adapter_config.json"


def open_model(model: str, gguf: str | None = None, *, mtp: bool = False) -> WeightSource:
    """Open and check a model; reads headers only.

    `model` is a Hugging Face folder (safetensors; or none and one GGUF model), a .gguf file, or a folder with one
    GGUF model, which may be split. `gguf` is a GGUF file or folder whose weights are to be used with the folder's
    configuration. A folder's config.json goes before GGUF metadata; one with adapter_config.json is refused. `mtp`:
    with the layer of multi-token prediction. Raises UserError for a path that leads nowhere and for a model without
    such a layer, ModelFileError for files that cannot be served.
    """
    try:
        return _open(_existing(model, "model"), gguf, mtp)
    except OSError as error:  # of a folder that may not be looked into, say
        raise ModelFileError(f"{error.filename or model}: cannot be read: {error.strerror}", "model") from error


def _open(path: Path, gguf: str | None, mtp: bool) -> WeightSource:
    config = _folder_config(path)
    if gguf is not None:
        if config is None:
            raise UserError(f"{path}: gguf is given, so model must be a folder with config.json", "model")
        return GGUFSource(open_gguf(_existing(gguf, "gguf")), config, mtp=mtp)
    _refuse_adapter(path)
    if has_safetensors(path):
        if config is None:
            raise ModelFileError(f"{path}: config.json is missing; fetch all of it: ktserve pull hf:ORG/REPO", "model")
        return SafetensorsSource(path, config, mtp=mtp)
    if path.is_dir() and not any(path.glob("*.gguf")):
        other = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
        found = f"holds neither {SINGLE}, {INDEX} nor a .gguf file, but {other}"
        if any(path.glob("*.bin")) or any(path.glob("*.pt*")):
            found += ", and pickled weights are not read"
        raise ModelFileError(f"{path}: {found}; fetch a model: ktserve pull hf:ORG/REPO", "model")
    file = open_gguf(path)
    if path.is_dir() and (pickled := sorted(p.name for p in path.glob("pytorch_model*.bin"))):
        raise ModelFileError(
            f"{path}: holds {pickled[0]}, which transformers would take and is not read here, and {file.path.name}: "
            "name that file if it is meant",
            "model",
        )
    return GGUFSource(file, config, mtp=mtp)


def has_safetensors(folder: Path) -> bool:
    """Whether a folder's own safetensors are what it serves, whatever else lies in it."""
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def _refuse_adapter(path: Path) -> None:
    """Of a folder with adapter_config.json transformers takes the adapter, over the base that this names, whatever
    weights lie beside it."""
    if not path.is_dir() or not (path / ADAPTER_CONFIG).is_file():
        return
    serve = f"ktserve serve BASE --adapters NAME={path}"
    if not has_safetensors(path) and not any(path.glob("*.gguf")):
        raise ModelFileError(f"{path}: is an adapter, no model: {serve}", "model")
    raise ModelFileError(
        f"{path}: holds a model's weights and {ADAPTER_CONFIG}, by which transformers would load the adapter over its "
        f"base instead: {serve} serves the adapter; move {ADAPTER_CONFIG} to another folder to serve the weights",
        "model",
    )


def _existing(name: str, field: str) -> Path:
    path = Path(os.path.expanduser(name))
    try:
        found = bool(name) and path.exists()
    except OSError as error:
        raise UserError(f"{field} {name[:200]!r}: cannot be read: {error.strerror}", field) from error
    if not found:
        raise UserError(f"{field} {name[:200]!r}: no such file or folder{elsewhere(name)}", field)
    return path


def _folder_config(path: Path) -> ModelConfig | None:
    file = path / "config.json"
    if not path.is_dir() or not file.is_file():
        return None
    generation = path / "generation_config.json"
    return config_from_hf(read_json(file), read_json(generation) if generation.is_file() else None, str(file))
