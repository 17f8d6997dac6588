"""Random blocks of any GGML type."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import torch

_SCALES = {  # byte offsets of a block's; 0 where they are not here
    "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,),
    **dict.fromkeys(("Q4_K", "Q5_K", "Q4_1", "Q5_1"), (0, 2)),
}  # fmt: skip


def random_bytes(type: str, n: int, k: int) -> npt.NDArray[np.uint8]:
    """Random quants under scales of about 0.01; bf16 values of about 0.02."""
    if type == "BF16":
        values: npt.NDArray[np.uint8] = torch.randn(n, k).mul_(0.02).bfloat16().view(torch.uint8).numpy().ravel()
        return values
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    blocks = np.random.default_rng(0).integers(0, 256, (n * k // block, size), dtype=np.uint8)
    if type == "MXFP4":
        blocks[:, 0] = 120
    for offset in _SCALES.get(type, (0,)) if type != "MXFP4" else ():
        blocks[:, offset : offset + 2] = np.array([0.01], np.float16).view(np.uint8)
    return blocks.ravel()
