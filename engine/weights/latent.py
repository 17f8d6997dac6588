"""The projection from latents to keys and values as absorbed attention multiplies with it: two matrices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.architectures.config import ModelConfig
from engine.architectures.parts.mla import Latent
from engine.files.model_file import made_of
from engine.weights.store import JoinedTensor, WeightTensor

LATENT_UP = "kv_b_proj.weight"


def latent_halves(weight: WeightTensor, heads: int, nope: int) -> tuple[WeightTensor, WeightTensor]:
    """weight [heads x (nope + value), latent] -> keys [heads x latent, nope], each head's rows transposed, and values
    [heads x value, latent]; not read yet.

    Both are of the file's types where it has them so. Of one tensor, values are rows of it; its keys are of its type
    if that is not quantised, else float32: blocks lie along the latents, and products sum over the other axis.
    """
    if isinstance(weight, JoinedTensor):
        keys, values = weight.stored
        return _matrix(keys), _matrix(values)
    (rows, latent), head = weight.shape, weight.shape[0] // heads

    def value_rows() -> npt.NDArray[np.uint8]:
        return np.ascontiguousarray(weight.data[:].reshape(heads, head, -1)[:, nope:]).reshape(-1)

    def key_columns() -> npt.NDArray[np.uint8]:
        if weight.quantised:
            held = weight.dequantise(torch.float32).numpy()
        else:
            held = weight.data[:].view(np.dtype(f"u{element}"))
        by_heads = held.reshape(heads, head, latent)[:, :nope]
        return np.ascontiguousarray(by_heads.swapaxes(1, 2)).view(np.uint8).reshape(-1)

    element = 4 if weight.quantised else weight.num_bytes // (rows * latent)
    size = heads * (head - nope) * (weight.num_bytes // rows)
    keys_data = made_of(weight.data, heads * latent * nope * element, key_columns)
    kind = "F32" if weight.quantised else weight.type
    return (
        WeightTensor(weight.name, (heads * latent, nope), kind, keys_data),
        WeightTensor(weight.name, (heads * (head - nope), latent), weight.type, made_of(weight.data, size, value_rows)),
    )


def held_apart(config: ModelConfig, weight: WeightTensor) -> tuple[WeightTensor, ...]:
    """The matrices that the native kernels hold of a projection: of one from latents its halves, else itself."""
    if not weight.name.endswith(LATENT_UP):
        return (weight,)
    spec = config.layers[int(weight.name.split(".")[2])].attention
    assert isinstance(spec, Latent)
    return latent_halves(weight, spec.heads, spec.nope_dim)


def _matrix(half: WeightTensor) -> WeightTensor:
    """[heads, rows, in] as [heads x rows, in]."""
    heads, rows, inputs = half.shape
    return WeightTensor(half.name, (heads * rows, inputs), half.type, half.data)
