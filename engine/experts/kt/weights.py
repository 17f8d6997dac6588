"""A layer's weights as kt_kernel reads them: one contiguous run of all experts behind a pointer.

Its bf16, int8 and int4 classes repack a copy while loading. Its llamafile class keeps computing from the pointer, so
the file's blocks stay in memory.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import torch

from engine.weights.store import ExpertStore, WeightTensor


def ggml_number(name: str) -> int:
    """A GGML type's number from its name."""
    return int(gguf.GGMLQuantizationType[name])


def bf16_pointer(store: ExpertStore, projection: str) -> tuple[int, Any]:
    """(address, owner) of a projection as bfloat16 [E, out, in]; keep the owner until the layer has loaded."""
    if store.type(projection) == "BF16":
        return block_pointer(store, projection)
    tensor = store.stacked(projection, torch.bfloat16).contiguous()
    return tensor.data_ptr(), tensor


def block_pointer(store: ExpertStore, projection: str) -> tuple[int, Any]:
    """(address, owner) of a projection's stored bytes, all experts.
    Keep the owner as long as the layer is used."""
    held: WeightTensor | list[WeightTensor] = getattr(store, projection)
    data = held.data[:] if isinstance(held, WeightTensor) else np.concatenate([weight.data[:] for weight in held])
    data = np.ascontiguousarray(data)
    return int(data.ctypes.data), data
