"""A GGUF model as a WeightSource."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from engine.architectures.config import LayerSpec, ModelConfig
from engine.architectures.numbers import extra_mtp
from engine.architectures.parts.base import Module
from engine.architectures.parts.delta import DeltaNet
from engine.architectures.registry import architecture_of, config_from_gguf
from engine.errors import ModelFileError
from engine.files.gguf.file import GGUFFile
from engine.files.model_file import Bytes, FileBytes, MadeBytes, ModelFile, made_of, part
from engine.weights.checks import Found, refuse_extra, refuse_types, require, with_mtp, without_left_out
from engine.weights.layout import GGUF_HEAD, Tensor, expert_shape, gguf_expert_name, tensors
from engine.weights.store import ExpertStore, JoinedTensor, WeightSource, WeightTensor

_PROJECTIONS = ("gate", "up", "down")


class GGUFSource(WeightSource):
    """`config` overrides what the metadata says (a Hugging Face folder given beside the file); the two must agree
    on the structure. Raises ModelFileError unless every tensor is there, readable and of the right shape. `mtp`: with
    the layer of multi-token prediction; UserError if there is none."""

    def __init__(self, file: GGUFFile, config: ModelConfig | None = None, *, mtp: bool = False) -> None:
        self.file = file
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        own = config_from_gguf(file.metadata, shapes, {t.type for t in file.tensors.values()}, str(file.path))
        merged = own if config is None else _merge(config, own, file)
        self.config = with_mtp(file.tensors, merged, file.path, gguf=True) if mtp else merged
        self._dense = tensors(self.config)
        self._check()

    def tensor(self, name: str) -> WeightTensor:
        if name not in self._dense:
            raise KeyError(name)
        wanted = self._dense[name]
        if (halves := self._halves(wanted)) is not None:
            return self._joined(wanted, *halves)
        data = self.file.data(wanted.gguf)
        return WeightTensor(name, wanted.shape, self.file.tensors[wanted.gguf].type, _in_order(data, wanted))

    def has(self, name: str) -> bool:
        return name in self._dense

    def experts(self, layer: int) -> ExpertStore:
        if layer not in self.config.sparse_layers:
            raise KeyError(f"layer {layer} has no routed experts")
        if self._single(layer):
            gate, up, down = (self._single_experts(layer, projection) for projection in _PROJECTIONS)
            return self._with_biases(ExpertStore(layer, gate, up, down))
        stacked = self._expert_tensor(layer, "down")
        if gguf_expert_name(layer, "gate_up") not in self.file.tensors:
            halves = self._expert_tensor(layer, "gate"), self._expert_tensor(layer, "up")
            return self._with_biases(ExpertStore(layer, *halves, stacked))
        gate, up = split_gate_up(self._expert_tensor(layer, "gate_up"))
        return self._with_biases(ExpertStore(layer, gate, up, stacked))

    def names(self) -> list[str]:
        order = {name: i for i, name in enumerate(self.file.tensors)}

        def place(name: str) -> int:
            halves = self._halves(self._dense[name])
            return order[self._dense[name].gguf if halves is None else halves[0]]

        return sorted(self._dense, key=place)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.file.tensors.values())

    @property
    def files(self) -> list[ModelFile]:
        return self.file.files

    def _expert_tensor(self, layer: int, projection: str) -> WeightTensor:
        stored = self.file.tensors[gguf_expert_name(layer, projection)]
        name = f"model.layers.{layer}.mlp.experts.{projection}_proj"
        return WeightTensor(name, stored.shape, stored.type, self.file.data(stored.name))

    def _halves(self, tensor: Tensor) -> tuple[str, str] | None:
        """The tensors that it is made of where the file has not the whole; None: it is not made of any."""
        if tensor.gguf in self.file.tensors or not (halves := _half_shapes(tensor)):
            return None
        keys, values = halves
        return keys, values

    def _joined(self, tensor: Tensor, keys: str, values: str) -> JoinedTensor:
        """Rows of keys, then of values, head by head."""
        shapes = _half_shapes(tensor)  # of which the file may leave out dimensions of one
        stored = [self.file.tensors[name] for name in (keys, values)]
        parts = [WeightTensor(held.name, shapes[held.name], held.type, self.file.data(held.name)) for held in stored]

        def make() -> npt.NDArray[np.uint8]:
            k, v = (part.dequantise(torch.float32) for part in parts)
            joined = torch.cat((k.transpose(1, 2), v), dim=1).reshape(tensor.shape)
            return joined.view(torch.uint8).flatten().numpy()

        size = math.prod(tensor.shape) * 4
        ranges = tuple(part.data for part in parts if isinstance(part.data, FileBytes))
        return JoinedTensor(tensor.name, tensor.shape, "F32", MadeBytes(ranges, size, make), *parts)

    def _single(self, layer: int) -> bool:
        """Whether experts are tensors of their own, as llama.cpp's converter wrote them at first."""
        return _single_name(layer, 0, "down") in self.file.tensors

    def _single_experts(self, layer: int, projection: str) -> list[WeightTensor]:
        tensors = []
        for expert in range(self.config.num_experts):
            stored = self.file.tensors[_single_name(layer, expert, projection)]
            name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"
            tensors.append(WeightTensor(name, stored.shape, stored.type, self.file.data(stored.name)))
        return tensors

    def _check(self) -> None:
        names, self.left_out = without_left_out(self.file.tensors, self.config, gguf=True)
        tensors = {name: self.file.tensors[name] for name in names}
        found = {n: Found(t.shape, t.type, self.file.parts[n].path) for n, t in tensors.items()}
        refuse_types(found)
        needed = {name: shape for tensor in self._dense.values() for name, shape in self._needed(tensor)}
        for layer in self.config.sparse_layers:
            needed |= self._needed_experts(layer)
        for name, shape in needed.items():
            if name in found and found[name].shape == tuple(size for size in shape if size > 1):
                continue  # dimensions of one may be left out: projections to one value, a convolution's channels
            require(name, shape, found, self.file.path)
        refuse_extra(found.keys() - needed.keys(), self.file.path)
        for layer in self.config.sparse_layers:
            self._check_single(layer)

    def _needed(self, tensor: Tensor) -> Iterator[tuple[str, tuple[int, ...]]]:
        """What the file must have of a tensor, and what it may have beside it."""
        stored, halves = tensor.gguf in self.file.tensors, _half_shapes(tensor)
        if stored or not halves:
            yield tensor.gguf, tensor.shape
        if halves and (not stored or set(halves) <= self.file.tensors.keys()):
            yield from halves.items()

    def _needed_experts(self, layer: int) -> dict[str, tuple[int, ...]]:
        config, experts = self.config, self.config.num_experts
        if self._single(layer):
            names = ((projection, expert) for projection in _PROJECTIONS for expert in range(experts))
            return {_single_name(layer, e, p): expert_shape(config, p) for p, e in names}
        fused = gguf_expert_name(layer, "gate_up") in self.file.tensors
        projections = ("gate_up", "down") if fused else _PROJECTIONS
        return {gguf_expert_name(layer, p): (experts, *expert_shape(config, p)) for p in projections}

    def _check_single(self, layer: int) -> None:
        """All experts of a projection must be of one type: backends read them as one array."""
        if not self._single(layer):
            return
        for projection in _PROJECTIONS:
            types = [weight.type for weight in self._single_experts(layer, projection)]
            if len(set(types)) > 1:
                raise ModelFileError(
                    f"{self.file.path}: experts of layer {layer}, {projection}, have types "
                    f"{', '.join(sorted(set(types)))}; the experts of a layer must be of one type",
                    "model",
                )


def _half_shapes(tensor: Tensor) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that GGUF may have instead of this one; none of most."""
    if tensor.module is None or tensor.module.halves is None:
        return {}
    at = tensor.gguf.removesuffix(f"{tensor.module.gguf}.weight")
    return {f"{at}{half.gguf}.weight": half.shape for half in tensor.module.halves}


def _single_name(layer: int, expert: int, projection: str) -> str:
    return f"blk.{layer}.ffn_{projection}.{expert}.weight"


def _in_order(data: Bytes, tensor: Tensor) -> Bytes:
    """A tensor's rows as transformers has them. GGUF's "rotary_pairs" has those that are rotated together, i and
    i + half of a head, next to each other."""
    module = tensor.module
    if module is None or not module.rows:
        return data
    rows, order = tensor.shape[0], np.argsort(gguf_rows(module))

    def make() -> npt.NDArray[np.uint8]:
        return np.ascontiguousarray(data[:].reshape(rows, -1)[order]).reshape(-1)

    return made_of(data, data.nbytes, make)


def gguf_rows(module: Module) -> npt.NDArray[np.intp]:
    """Which row of a module with `rows` is each row of it in GGUF."""
    rows, head = module.shape[0], module.head_rows
    return np.arange(rows).reshape(rows // head, 2, head // 2).swapaxes(1, 2).reshape(-1)


def split_gate_up(fused: WeightTensor) -> tuple[list[WeightTensor], list[WeightTensor]]:
    """[E, 2I, H] -> each expert's gate [I, H] and up [I, H], views: gate's rows lie before up's."""
    halves: tuple[list[WeightTensor], list[WeightTensor]] = ([], [])
    for index in range(fused.shape[0]):
        expert = fused[index]
        rows, middle = expert.shape[0] // 2, expert.num_bytes // 2
        for half, span in zip(halves, (slice(0, middle), slice(middle, None)), strict=True):
            half.append(WeightTensor(expert.name, (rows, expert.shape[1]), expert.type, part(expert.data, span)))
    return halves


def _merge(config: ModelConfig, own: ModelConfig, file: GGUFFile) -> ModelConfig:
    """The folder's configuration, after a check that both describe one model. The head is tied if the file has
    none; a head that the file does have is used even where the folder says tied, as transformers does."""
    if architecture_of(config).language_model != architecture_of(own).language_model:
        raise ModelFileError(
            f"{file.path}: is a {own.architecture} model, and the folder's config.json describes {config.architecture}",
            "model",
        )
    ours, theirs = own.numbers(), config.numbers()
    for name, given in theirs.items():
        stored = ours.get(name, 0)
        if not math.isclose(given, stored, rel_tol=1e-6):
            raise ModelFileError(
                f"{file.path}: {name} is {stored} in the GGUF file and {given} in the folder's config.json; "
                "they are not the same model",
                name,
            )
    if own.tie_word_embeddings and not config.tie_word_embeddings:
        raise ModelFileError(f"{file.path}: tensor {GGUF_HEAD} is missing, and config.json says untied", "model")
    layers = tuple(_merge_layer(i, *pair, file) for i, pair in enumerate(zip(config.layers, own.layers, strict=True)))
    mtp = None if own.mtp is None else extra_mtp(layers)
    return dataclasses.replace(config, layers=layers, tie_word_embeddings=own.tie_word_embeddings, mtp=mtp)


def _merge_layer(layer: int, given: LayerSpec, stored: LayerSpec, file: GGUFFile) -> LayerSpec:
    """As config.json says; the form of a delta net's projections and the order of its heads are the file's."""
    kinds = [
        "linear_attention" if isinstance(spec.attention, DeltaNet) else "full_attention" for spec in (stored, given)
    ]
    if kinds[0] != kinds[1]:
        raise ModelFileError(
            f"{file.path}: layer {layer} has {kinds[0]} in the GGUF file and {kinds[1]} in the folder's config.json; "
            "they are not the same model",
            "layer_types",
        )
    return dataclasses.replace(given, attention=stored.attention) if kinds[0] == "linear_attention" else given
