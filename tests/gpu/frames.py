"""A layer's experts as GPU memory holds them, made from the file without a backend."""

from __future__ import annotations

import torch

from engine.experts.gpu.layout import PROJECTIONS, Frame, Sizes, frame_of
from engine.weights.store import ExpertStore
from engine.weights.tiled.convert import Packer


def frames_of(store: ExpertStore, sizes: Sizes, dtype: torch.dtype) -> tuple[Frame, torch.Tensor]:
    """(what a frame holds, uint8 [E, bytes of a frame] on the CPU)."""
    frame = frame_of(store, dtype.itemsize, None)
    frames = torch.empty(sizes.experts, frame.num_bytes, dtype=torch.uint8)
    pack = Packer(torch.device("cpu"))
    for name, matrix, at in zip(PROJECTIONS, frame.matrices, frame.starts, strict=True):
        weights = [store.expert(name, expert) for expert in range(sizes.experts)]
        pack.put(weights, matrix, frames[:, at : at + matrix.num_bytes], dtype)
    return frame, frames
