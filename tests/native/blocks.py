"""Random GGUF blocks with sane scales, and the values they stand for."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt

# Byte offsets of a block's float16 scales; MXFP4's is a byte of its own kind.
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
    "MXFP4": (),
}
QUANTISED = list(SCALES)


def values_of_block(kind: str) -> int:
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]


def random_blocks(kind: str, n: int, k: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """uint8 [n, bytes of a row]: every bit of the quants is random, scales are about 0.01."""
    rng = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (n * k // block, size), dtype=np.uint8)
    for offset in SCALES[kind]:
        scales = (rng.standard_normal(len(data)) * 0.01).astype(np.float16)
        data[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind == "MXFP4":
        data[:, 0] = rng.integers(118, 124, len(data))
    return data.reshape(n, -1)


def values_of(kind: str, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """float32 [n, k] by the gguf package, llama.cpp's own reference in Python."""
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
