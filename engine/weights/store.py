"""Weights as they lie in files, before any backend repacks them.

Nothing is read before it is needed: `WeightTensor.data` is usually a place in a file. A backend asks for what it wants:
the raw GGUF blocks, or a dequantised torch tensor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.architectures.parts.mlp import SILU, Activation
from engine.errors import ModelFileError
from engine.files.model_file import Bytes, ModelFile, part
from engine.weights.dequant import Piece, pieces, unwritten
from engine.weights.threads import in_order, made_ahead

if TYPE_CHECKING:
    from engine.architectures.config import ModelConfig


@dataclass(frozen=True)
class WeightTensor:
    """One tensor. `shape` is C order ([out, in] or [experts, out, in]); `type` is a GGML type name
    ("F32", "F16", "BF16", "Q8_0", "Q4_K", ...), also for safetensors. `data[:]` is uint8 [num_bytes]."""

    name: str
    shape: tuple[int, ...]
    type: str
    data: Bytes

    @property
    def num_bytes(self) -> int:
        return int(self.data.nbytes)

    @property
    def stored(self) -> tuple[WeightTensor, ...]:
        """The tensors of the file that it is."""
        return (self,)

    @property
    def quantised(self) -> bool:
        return self.type not in ("F32", "F16", "BF16")

    def dequantise(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The whole tensor as torch, in `dtype`; a fresh copy that owns its memory. ModelFileError if a value is NaN or
        infinite, or is so in `dtype`."""
        return dequantised([self], dtype)[0]

    def require_finite(self, bad: int | None) -> None:
        """ModelFileError if one of its values, in their order, is not finite."""
        if bad is not None:
            place = [int(i) for i in np.unravel_index(bad, self.shape)]
            raise ModelFileError(f"{self.name}: value {place} of {list(self.shape)} is not finite")

    def __getitem__(self, index: int) -> WeightTensor:
        """Slice `index` of the first axis (one expert), not read yet. It is always a run of whole blocks."""
        size = self.num_bytes // self.shape[0]
        return WeightTensor(
            f"{self.name}[{index}]", self.shape[1:], self.type, part(self.data, slice(index * size, (index + 1) * size))
        )


@dataclass(frozen=True)
class JoinedTensor(WeightTensor):
    """A projection from latents to keys and values [heads x (nope + value), latent] of which the file has two tensors:
    `keys` [heads, latent, nope], each head's rows transposed, and `values` [heads, value, latent]. `data` is both as
    float32 rows: across a row of keys the file has other blocks."""

    keys: WeightTensor
    values: WeightTensor

    @property
    def stored(self) -> tuple[WeightTensor, ...]:
        return self.keys, self.values


@dataclass(frozen=True)
class ExpertStore:
    """One layer's routed experts: gate, up [E, I, H], down [E, H, I], each in one type.

    `biases`: of gate, up [E, I] and down [E, H], by name, where there are some.

    Held per projection either as one stacked tensor (GGUF, fused safetensors) or as E separate ones
    (per-expert safetensors), so that reading needs no copy.
    """

    layer: int
    gate: WeightTensor | list[WeightTensor]
    up: WeightTensor | list[WeightTensor]
    down: WeightTensor | list[WeightTensor]
    activation: Activation = field(default=SILU, kw_only=True)
    biases: Mapping[str, WeightTensor] = field(default_factory=dict, kw_only=True)

    @property
    def num_weights(self) -> int:
        """Of all experts."""
        return self.num_experts * sum(
            math.prod(self.expert(projection, 0).shape) for projection in ("gate", "up", "down")
        )

    @property
    def num_experts(self) -> int:
        return self.gate.shape[0] if isinstance(self.gate, WeightTensor) else len(self.gate)

    def projections(self) -> Iterator[tuple[str, WeightTensor | list[WeightTensor]]]:
        yield "gate", self.gate
        yield "up", self.up
        yield "down", self.down

    def expert(self, projection: str, index: int) -> WeightTensor:
        """One expert's [out, in]."""
        held: WeightTensor | list[WeightTensor] = getattr(self, projection)
        return held[index]

    def stacked(self, projection: str, dtype: torch.dtype) -> torch.Tensor:
        """[E, out, in] dequantised to `dtype`, contiguous."""
        held: WeightTensor | list[WeightTensor] = getattr(self, projection)
        return held.dequantise(dtype) if isinstance(held, WeightTensor) else dequantised(held, dtype)

    def name(self, projection: str) -> str:
        """The projection's tensor, or the first and the last of its experts'."""
        held: WeightTensor | list[WeightTensor] = getattr(self, projection)
        return held.name if isinstance(held, WeightTensor) else f"{held[0].name} to {held[-1].name}"

    def type(self, projection: str) -> str:
        return self.expert(projection, 0).type

    @property
    def num_bytes(self) -> int:
        return sum(
            p.num_bytes if isinstance(p, WeightTensor) else sum(w.num_bytes for w in p) for _, p in self.projections()
        )


def dequantised(weights: Sequence[WeightTensor], dtype: torch.dtype) -> torch.Tensor:
    """Tensors of one shape as one, [count, *shape], fresh and contiguous, in `dtype`. ModelFileError as of
    `WeightTensor.dequantise`."""
    shape = weights[0].shape
    out = unwritten(len(weights), math.prod(shape), dtype=dtype)

    def fill(number: int, piece: Piece) -> tuple[int, int | None]:
        return number, piece.into(out[number, piece.first : piece.first + piece.count])

    calls = (partial(fill, number, piece) for number, piece in pieces_of(weights))
    with closing(in_order(calls)) as filled:
        for number, bad in filled:
            weights[number].require_finite(bad)
    return out.reshape(len(weights), *shape)


def pieces_of(weights: Sequence[WeightTensor]) -> Iterator[tuple[int, Piece]]:
    """Of all of them, in their order, each with its tensor's number. Bytes that must be made are made on threads, those
    of some tensors ahead."""
    for number, data in enumerate(made_ahead([weight.data for weight in weights])):
        for piece in pieces(data, weights[number].type, weights[number].shape):
            yield number, piece


class WeightSource(ABC):
    """A model on disk, opened and checked as a whole: every tensor the model needs is there, of the right
    shape and of a type that can be read. Opening reads headers only. Names are those of `engine.weights.layout`
    ("model.layers.0.self_attn.q_proj.weight", "lm_head.weight"), whatever the file calls them."""

    config: ModelConfig
    left_out: Sequence[str] = ()  # lines on parts of the files that are not read

    @property
    def undivided(self) -> WeightSource:
        """All of the model's tensors, where this one has a rank's part of them."""
        return self

    @property
    def whole(self) -> ModelConfig:
        """Of the whole model, of which `config` may describe one rank's part (engine/ranks/shard.py)."""
        return self.config

    @abstractmethod
    def tensor(self, name: str) -> WeightTensor:
        """Any tensor but the routed experts. KeyError if the model has none of that name."""

    @abstractmethod
    def has(self, name: str) -> bool: ...

    @abstractmethod
    def experts(self, layer: int) -> ExpertStore:
        """The routed experts of a sparse layer."""

    def _with_biases(self, store: ExpertStore) -> ExpertStore:
        """The store with what its experts have beside their projections."""
        spec = self.config.experts
        if spec is None or spec.plain:
            return store
        at = f"model.layers.{store.layer}.mlp.experts"
        names = [name for name, _ in store.projections()] if spec.expert_bias else []
        biases = {name: self.tensor(f"{at}.{name}_bias") for name in names}
        return replace(store, activation=spec.activation, biases=biases)

    @abstractmethod
    def names(self) -> list[str]:
        """All tensors but the routed experts, in file order."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of all tensors on disk."""

    @property
    @abstractmethod
    def files(self) -> list[ModelFile]:
        """The files that hold the weights."""

    @property
    def identity(self) -> str:
        """Names, sizes and times of change of the files: what tells one state of them from another."""
        return " ".join(file.identity for file in self.files)

    def check_unchanged(self) -> None:
        """ModelFileError if a file was written to since it was opened."""
        for file in self.files:
            file.check_unchanged()
