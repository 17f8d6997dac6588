"""A layer's experts as GPU memory holds them, made from the file without a backend."""

from __future__ import annotations

import torch

from engine.experts.gpu.layout import PROJECTIONS, ExpertLayout, Sizes, expert_layout
from engine.weights.store import ExpertStore
from engine.weights.tiled.packer import Packer


def expert_slots_of(store: ExpertStore, sizes: Sizes, dtype: torch.dtype) -> tuple[ExpertLayout, torch.Tensor]:
    """(how an expert lies in its slot, uint8 [E, bytes of an expert] on the CPU)."""
    layout = expert_layout(store, dtype.itemsize, None)
    expert_slots = torch.empty(sizes.experts, layout.num_bytes, dtype=torch.uint8)
    pack = Packer(torch.device("cpu"))
    for name, matrix, at in zip(PROJECTIONS, layout.matrices, layout.starts, strict=True):
        weights = [store.expert(name, expert) for expert in range(sizes.experts)]
        pack.put(weights, matrix, expert_slots[:, at : at + matrix.num_bytes], dtype)
    return layout, expert_slots
