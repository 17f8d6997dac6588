"""A GGUF model as a WeightSource."""

from __future__ import annotations

import dataclasses
import math

from engine.architectures.config import ModelConfig
from engine.architectures.registry import config_from_gguf
from engine.errors import ModelFileError
from engine.files.gguf.file import GGUFFile
from engine.files.model_file import ModelFile, part
from engine.weights.checks import Found, refuse_extra, refuse_types, require
from engine.weights.layout import GGUF_HEAD, dense_tensors, expert_shape, gguf_expert_name, gguf_names
from engine.weights.store import ExpertStore, WeightSource, WeightTensor


class GGUFSource(WeightSource):
    """`config` overrides what the metadata says (a Hugging Face folder given beside the file); the two must agree
    on the structure. Raises ModelFileError unless every tensor is there, readable and of the right shape."""

    def __init__(self, file: GGUFFile, config: ModelConfig | None = None) -> None:
        self.file = file
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        own = config_from_gguf(file.metadata, shapes, {t.type for t in file.tensors.values()}, str(file.path))
        self.config = own if config is None else _merge(config, own, file)
        self._dense, self._stored = dense_tensors(self.config), gguf_names(self.config)
        self._check()

    def tensor(self, name: str) -> WeightTensor:
        if name not in self._dense:
            raise KeyError(name)
        stored = self._stored[name]
        return WeightTensor(name, self._dense[name], self.file.tensors[stored].type, self.file.data(stored))

    def has(self, name: str) -> bool:
        return name in self._dense

    def experts(self, layer: int) -> ExpertStore:
        if not self.config.is_sparse(layer):
            raise KeyError(f"layer {layer} has no routed experts")
        down = self._expert_tensor(layer, "down")
        if gguf_expert_name(layer, "gate_up") not in self.file.tensors:
            return ExpertStore(layer, self._expert_tensor(layer, "gate"), self._expert_tensor(layer, "up"), down)
        gate, up = split_gate_up(self._expert_tensor(layer, "gate_up"))
        return ExpertStore(layer, gate, up, down)

    def names(self) -> list[str]:
        order = {name: i for i, name in enumerate(self.file.tensors)}
        return sorted(self._dense, key=lambda name: order[self._stored[name]])

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

    def _check(self) -> None:
        found = {n: Found(t.shape, t.type, self.file.parts[n].path) for n, t in self.file.tensors.items()}
        refuse_types(found)
        needed = {self._stored[name]: shape for name, shape in self._dense.items()}
        for layer in self.config.sparse_layers:
            fused = gguf_expert_name(layer, "gate_up") in found
            for projection in ("gate_up", "down") if fused else ("gate", "up", "down"):
                shape = (self.config.num_experts, *expert_shape(self.config, projection))
                needed[gguf_expert_name(layer, projection)] = shape
        for name, shape in needed.items():
            if shape[0] == 1 and name in found and found[name].shape == shape[1:]:
                continue  # a projection to one value may be stored as a vector
            require(name, shape, found, self.file.path)
        refuse_extra(found.keys() - needed.keys(), self.file.path)


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
    if config.architecture != own.architecture:
        raise ModelFileError(
            f"{file.path}: is a {own.architecture} model, and the folder's config.json describes {config.architecture}",
            "model",
        )
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "rope_theta",
        "rms_norm_eps",
    ):
        given, stored = getattr(config, name), getattr(own, name)
        if not math.isclose(given, stored, rel_tol=1e-6):
            raise ModelFileError(
                f"{file.path}: {name} is {stored} in the GGUF file and {given} in the folder's config.json; "
                "they are not the same model",
                name,
            )
    if own.tie_word_embeddings and not config.tie_word_embeddings:
        raise ModelFileError(f"{file.path}: tensor {GGUF_HEAD} is missing, and config.json says untied", "model")
    return dataclasses.replace(config, tie_word_embeddings=own.tie_word_embeddings)
