"""A Hugging Face folder with safetensors as a WeightSource: one file or shards with an index, the experts one by one
(`mlp.experts.3.gate_proj.weight`, as on the hub) or stacked (`mlp.experts.gate_up_proj`, transformers 5 in memory)."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from engine.architectures.config import ModelConfig
from engine.architectures.names import AS_HERE
from engine.architectures.registry import architecture_of
from engine.errors import ModelFileError, shown
from engine.files.json_file import read_json
from engine.files.model_file import FileBytes, MadeBytes, ModelFile
from engine.files.safetensors import SafetensorsFile, open_safetensors
from engine.weights.checks import Found, refuse_extra, require, with_mtp, without_left_out
from engine.weights.gguf import split_gate_up
from engine.weights.layout import HEAD, expert_shape, tensors
from engine.weights.safetensors.interleaved import take_interleaved
from engine.weights.safetensors.stored import Stored, stored_weights, zero_biases
from engine.weights.store import ExpertStore, WeightSource, WeightTensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")  # follows from the configuration; old checkpoints store it
_PROJECTIONS = ("gate", "up", "down")


class SafetensorsSource(WeightSource):
    """Raises ModelFileError unless every tensor is there, readable and of the right shape. As in transformers, a
    head that is stored is used even where the configuration says tied. `mtp`: with the layer of multi-token
    prediction; UserError if there is none."""

    def __init__(self, folder: Path, config: ModelConfig, *, mtp: bool = False) -> None:
        self.folder = folder
        self._files: dict[str, SafetensorsFile] = {}  # tensor name -> its file
        for file in _open_files(folder):
            for name in file.tensors:
                if name in self._files:
                    raise ModelFileError(
                        f"{file.path}: tensor {name} is also in {self._files[name].path.name}", "model"
                    )
                self._files[name] = file
        config = with_mtp(self._files, config, folder) if mtp else config
        names, self.left_out = without_left_out(self._files, config)
        read = {name: self._files[name] for name in names}
        experts = take_interleaved(read, config, folder)
        self._weights, self._names = self._renamed(stored_weights(read, config.quantisation) | experts, config)
        self.config = dataclasses.replace(
            config, tie_word_embeddings=config.tie_word_embeddings and HEAD not in self._weights
        )
        self._dense = tensors(self.config)
        self._check()

    def tensor(self, name: str) -> WeightTensor:
        if name not in self._dense:
            raise KeyError(name)
        tensor, stored = self._dense[name], self._stored(name)
        if tensor.negative_log:
            return _changed(stored, lambda values: -values.exp())
        if self.config.norms_minus_one and tensor.is_norm:
            return _changed(stored, lambda values: values + 1)
        return stored

    def has(self, name: str) -> bool:
        return name in self._dense

    def experts(self, layer: int) -> ExpertStore:
        if layer not in self.config.sparse_layers:
            raise KeyError(f"layer {layer} has no routed experts")
        if self._fused(layer):
            gate, up = split_gate_up(self._stored(_fused_name(layer, "gate_up")))
            return ExpertStore(layer, gate, up, self._stored(_fused_name(layer, "down")))
        gate, up, down = (
            [self._stored(_expert_name(layer, i, p)) for i in range(self.config.num_experts)] for p in _PROJECTIONS
        )
        return self._with_biases(ExpertStore(layer, gate, up, down))

    def names(self) -> list[str]:
        return [name for name in self._weights if name in self._dense]

    @property
    def num_bytes(self) -> int:
        return sum(file.tensors[name].num_bytes for name, file in self._files.items())

    @property
    def shards(self) -> list[SafetensorsFile]:
        """The files, by their names."""
        return sorted({id(file): file for file in self._files.values()}.values(), key=lambda file: file.path)

    @property
    def files(self) -> list[ModelFile]:
        return sorted({id(file): file.file for file in self._files.values()}.values(), key=lambda file: file.path)

    @staticmethod
    def _renamed(stored: dict[str, Stored], config: ModelConfig) -> tuple[dict[str, Stored], dict[str, str]]:
        """The weights by their names here, and what each is called in the files."""
        architecture, own = architecture_of(config), AS_HERE if config.mtp is None else config.mtp.names
        weights: dict[str, Stored] = {}
        names: dict[str, str] = {}
        for name, held in stored.items():
            canonical = own.canonical(architecture.canonical(name))
            if canonical in weights:
                raise ModelFileError(
                    f"{held.path}: tensors {name} and {names[canonical]} are one: leave one of them out", "model"
                )
            weights[canonical], names[canonical] = held, name
        return weights, names

    def _stored(self, name: str) -> WeightTensor:
        held = self._weights[name]
        return WeightTensor(name, held.shape, held.type, held.data)

    def _fused(self, layer: int) -> bool:
        return _fused_name(layer, "gate_up") in self._weights

    def _check(self) -> None:
        """Names in errors are those of the files."""
        found = {self._names[n]: Found(held.shape, held.type, held.path) for n, held in self._weights.items()}
        needed = {tensor.name: tensor.shape for tensor in self._dense.values()}
        for layer in self.config.sparse_layers:
            experts = self.config.num_experts
            if self._fused(layer):
                shapes = {p: expert_shape(self.config, p) for p in ("gate_up", "down")}
                needed |= {_fused_name(layer, p): (experts, *shape) for p, shape in shapes.items()}
            else:
                shapes = {p: expert_shape(self.config, p) for p in _PROJECTIONS}
                needed |= {_expert_name(layer, i, p): shapes[p] for i in range(experts) for p in _PROJECTIONS}
        for name, shape in needed.items():
            require(self._names.get(name, name), shape, found, self.folder)
        for layer in self.config.sparse_layers:
            self._check_types(layer, found)
        names = {self._names[n] for n in self._weights.keys() - needed.keys() if not _DERIVED.fullmatch(n)}
        refuse_extra(names - zero_biases(self._files, names), self.folder)

    def _check_types(self, layer: int, found: dict[str, Found]) -> None:
        """All experts of a projection must be of one type: backends read them as one array."""
        if self._fused(layer):
            return
        for projection in _PROJECTIONS:
            names = [self._names[_expert_name(layer, i, projection)] for i in range(self.config.num_experts)]
            first = found[names[0]]
            for name in names[1:]:
                other = found[name]
                if other.type != first.type:
                    raise ModelFileError(
                        f"{other.path}: tensor {name} has type {other.type}, "
                        f"expert 0 has {first.type}; the experts of a layer must be of one type",
                        "model",
                    )


def _changed(stored: WeightTensor, change: Callable[[torch.Tensor], torch.Tensor]) -> WeightTensor:
    """float32: what is changed is not exact in narrower types."""

    def make() -> npt.NDArray[np.uint8]:
        return change(stored.dequantise(torch.float32)).view(torch.uint8).numpy()

    ranges = (stored.data,) if isinstance(stored.data, FileBytes) else ()
    return WeightTensor(stored.name, stored.shape, "F32", MadeBytes(ranges, math.prod(stored.shape) * 4, make))


def _expert_name(layer: int, expert: int, projection: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"


def _fused_name(layer: int, projection: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{projection}_proj"


def _open_files(folder: Path) -> list[SafetensorsFile]:
    index = folder / INDEX
    if not index.is_file():
        if (folder / SINGLE).is_file():
            return [open_safetensors(folder / SINGLE)]
        raise ModelFileError(f"{folder}: neither {SINGLE} nor {INDEX} is there", "model")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index}: weight_map is missing or empty", "model")
    if (folder / SINGLE).is_file() and SINGLE not in weight_map.values():
        raise ModelFileError(
            f"{folder}: holds {SINGLE}, which transformers would take, and {INDEX}, which names other files: remove "
            "the one that is not meant",
            "model",
        )
    files: dict[str, SafetensorsFile] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelFileError(f"{index}: tensor {tensor} is said to be in {shown(name)}, not a file name", "model")
        if name not in files:
            if not os.path.isfile(folder / name):  # False for a name that no file can have, too
                raise ModelFileError(
                    f"{folder / name}: this file is named by {INDEX} and missing; fetch it: ktserve pull hf:ORG/REPO",
                    "model",
                )
            files[name] = open_safetensors(folder / name)
        if tensor not in files[name].tensors:
            raise ModelFileError(f"{folder / name}: tensor {tensor} should be here by {INDEX}", "model")
    for file in files.values():
        unlisted = file.tensors.keys() - weight_map.keys()
        if unlisted:
            raise ModelFileError(f"{file.path}: tensor {min(unlisted)} is not named by {INDEX}", "model")
    return list(files.values())
