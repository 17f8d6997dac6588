"""Values as blocks of GGUF's types, random where the gguf package cannot quantise."""

from __future__ import annotations

import math
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

# Where a block's float16 scale and minimum lie, and the minimum that centres random quants (per unit of scale).
_SCALE_AT: dict[str, tuple[int, int | None, float]] = {
    "Q4_0": (0, None, 0),
    "Q4_1": (0, 2, -7.5),
    "Q5_0": (0, None, 0),
    "Q5_1": (0, 2, -15.5),
    "Q8_0": (0, None, 0),
    "Q2_K": (80, 82, 1.5),
    "Q3_K": (108, None, 0),
    "Q4_K": (0, 2, 7.5),
    "Q5_K": (0, 2, 15.5),
    "Q6_K": (208, None, 0),
    "IQ1_S": (0, None, 0),
    "IQ2_XXS": (0, None, 0),
    "IQ2_XS": (0, None, 0),
    "IQ2_S": (0, None, 0),
    "IQ3_XXS": (0, None, 0),
    "IQ3_S": (0, None, 0),
    "IQ4_NL": (0, None, 0),
    "IQ4_XS": (0, None, 0),
    "TQ1_0": (52, None, 0),
    "TQ2_0": (64, None, 0),
}
QUANTISABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "TQ1_0", "TQ2_0")
CRAFTED = (
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "IQ3_S",
    "IQ3_XXS",
    "IQ2_S",
    "IQ2_XS",
    "IQ2_XXS",
    "IQ1_S",
)


def random_blocks(shape: tuple[int, ...], type: str, seed: int, std: float = 0.05) -> npt.NDArray[np.uint8]:
    """Valid random blocks [*shape[:-1], bytes of a row] of a quantised type, whose values have about `std`."""
    kind = gguf.GGMLQuantizationType[type]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise ValueError(f"{type} needs rows of a multiple of {block}, not {shape[-1]}")
    at, minimum_at, centre = _SCALE_AT[type]
    blocks = np.random.default_rng(seed).integers(0, 256, (math.prod(shape) // block, size), dtype=np.uint8)

    def scale(d: float) -> None:
        blocks[:, at : at + 2] = np.array([d], np.float16).view(np.uint8)
        if minimum_at is not None:
            blocks[:, minimum_at : minimum_at + 2] = np.array([d * centre], np.float16).view(np.uint8)

    scale(1.0)
    scale(std / float(gguf.quants.dequantize(blocks, kind).std()))
    return blocks.reshape(*shape[:-1], -1)


def encode(values: torch.Tensor, type: str, seed: int = 0) -> tuple[npt.NDArray[Any], torch.Tensor]:
    """(the array as GGUFWriter takes it, the float32 values it stands for). Types that the gguf package cannot
    quantise get random blocks of about the same spread: the values are then those of the blocks."""
    kind = gguf.GGMLQuantizationType[type]
    array = values.detach().float().contiguous().numpy()
    if type in QUANTISABLE:
        data = gguf.quants.quantize(array, kind)
    else:
        data = random_blocks(array.shape, type, seed, std=float(array.std()))
    return data, torch.from_numpy(np.array(gguf.quants.dequantize(data, kind), dtype=np.float32)).reshape(values.shape)
