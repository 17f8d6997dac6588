"""Random blocks with sane scales, of GGUF and of quantised safetensors, and the values they stand for."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import torch

# Byte offsets of a block's float16 scales; MXFP4's is a byte of its own kind, F8_E4M3's a float32.
SCALES: dict[str, tuple[int, ...]] = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "MXFP4": (),
    "INT4_G32": (0,),
    "INT4_G128": (0,),
    "F8_E4M3": (),
}
QUANTISED = list(SCALES)
_SIZES = {"INT4_G32": (32, 19), "INT4_G128": (128, 67), "F8_E4M3": (128, 132)}  # values, bytes of a block


def values_of_block(kind: str) -> int:
    return size_of_block(kind)[0]


def size_of_block(kind: str) -> tuple[int, int]:
    """Values and bytes."""
    return _SIZES[kind] if kind in _SIZES else gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


def random_blocks(kind: str, n: int, k: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """uint8 [n, bytes of a row]: every bit of the quants is random, scales are about 0.01."""
    rng = np.random.default_rng(seed)
    block, size = size_of_block(kind)
    data = rng.integers(0, 256, (n * k // block, size), dtype=np.uint8)
    for offset in SCALES[kind]:
        scales = (rng.standard_normal(len(data)) * 0.01).astype(np.float16)
        data[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind == "MXFP4":
        data[:, 0] = rng.integers(118, 124, len(data))
    if kind == "F8_E4M3":
        data[:, :4] = (rng.standard_normal((len(data), 1)) * 0.01).astype(np.float32).view(np.uint8)
        finite_f8(data)
    if kind.startswith("INT4"):
        data[:, 2] &= 15
    return data.reshape(n, -1)


def finite_f8(blocks: npt.NDArray[np.uint8]) -> None:
    """No NaN among the values of blocks [..., 132]."""
    values = blocks[..., 4:]
    values[values & 0x7F == 0x7F] ^= 1


def values_of(kind: str, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """float32 [n, k]; of GGUF's types by the gguf package, llama.cpp's own reference in Python."""
    if kind == "F8_E4M3":
        blocks = torch.from_numpy(np.ascontiguousarray(data)).view(len(data), -1, 132)
        scales = blocks[..., :4].contiguous().view(torch.float32)
        values = blocks[..., 4:].contiguous().view(torch.float8_e4m3fn).float() * scales
        return np.asarray(values.view(len(data), -1).numpy())
    if kind in _SIZES:
        block, size = _SIZES[kind]
        blocks = data.reshape(-1, size)
        values = np.empty((len(blocks), block), np.float64)
        for i in range(block):
            byte = blocks[:, 3 + i // 32 * 16 + i % 16].astype(np.int64)
            values[:, i] = (byte >> 4 if i % 32 >= 16 else byte & 15) - blocks[:, 2].astype(np.int64)
        scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float64)
        return (values * scales).astype(np.float32).reshape(len(data), -1)
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
