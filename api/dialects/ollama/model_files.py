"""What Ollama's clients show of a model: its family, sizes and form, from the headers of its files."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from engine.errors import UserError
from engine.files.gguf.file import open_gguf
from engine.files.json_file import read_json
from engine.files.safetensors import open_safetensors

_NAMES = {  # of transformers' configurations, as GGUF's metadata has them
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}


@dataclass(frozen=True)
class ModelFiles:
    """`info`: GGUF's names without the family. What files do not tell is empty or 0."""

    form: str = ""
    family: str = ""
    parameters: int = 0
    quantisation: str = ""
    num_bytes: int = 0
    digest: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parameter_size(self) -> str:
        for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
            if self.parameters >= size:
                return f"{self.parameters / size:.1f}{unit}"
        return str(self.parameters) if self.parameters else ""


@lru_cache(maxsize=8)
def model_files(path: str) -> ModelFiles:
    """Of a folder or a GGUF file. What cannot be read is left out: the engine says what is wrong with it."""
    place = Path(path)
    try:
        if place.is_file() or any(place.glob("*.gguf")):
            return _of_gguf(place)
        return _of_folder(place) if place.is_dir() else ModelFiles()
    except (UserError, OSError):
        return ModelFiles()


def _of_gguf(place: Path) -> ModelFiles:
    opened = open_gguf(place)
    family = str(opened.metadata.get("general.architecture", ""))
    own = f"{family}."
    numbers = {
        key.removeprefix(own): value
        for key, value in opened.metadata.items()
        if key.startswith(own) and isinstance(value, int | float | str)
    }
    tensors = opened.tensors.values()
    types: Counter[str] = Counter()
    for tensor in tensors:
        types[tensor.type] += prod(tensor.shape)
    size = sum(tensor.num_bytes for tensor in tensors)
    digest = _digest(opened.metadata, size)
    return ModelFiles("gguf", family, sum(types.values()), _commonest(types), size, digest, numbers)


def _of_folder(folder: Path) -> ModelFiles:
    config = read_json(folder / "config.json")
    types: Counter[str] = Counter()
    size = 0
    for file in sorted(folder.glob("*.safetensors")):
        for tensor in open_safetensors(file).tensors.values():
            types[tensor.type] += prod(tensor.shape)
            size += tensor.num_bytes
    numbers = {ours: config[theirs] for theirs, ours in _NAMES.items() if isinstance(config.get(theirs), int)}
    family = str(config.get("model_type", "")).replace("_", "")
    digest = _digest(config, size)
    return ModelFiles("safetensors", family, sum(types.values()), _commonest(types), size, digest, numbers)


def _commonest(types: Counter[str]) -> str:
    return next((name for name, _ in types.most_common(1)), "")


def _digest(described: Mapping[str, Any], size: int) -> str:
    """Of what the files say of themselves and their size; their weights are not read for it."""
    names = sorted((key, value) for key, value in described.items() if isinstance(value, int | float | str))
    return hashlib.sha256(repr((names, size)).encode()).hexdigest()
