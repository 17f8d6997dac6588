"""In which type activations, unquantised weights and the KV cache are held."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.placement import Placement, activation_dtype


@dataclass(frozen=True)
class Precision:
    activations: torch.dtype  # the residual stream and all that is computed from it
    weights: torch.dtype  # unquantised projections and experts, the embedding
    kv: torch.dtype


def choose_precision(config: EngineConfig, placement: Placement) -> Precision:
    """`dtype` "float32" and "bfloat16" hold everything so. "auto" is bfloat16, but where the native kernels compute
    everything activations stay float32: they are few, and rounding them is what costs accuracy."""
    if config.dtype == "auto" and _all_native(placement):
        return Precision(torch.float32, torch.bfloat16, torch.bfloat16)
    dtype = activation_dtype(config)
    return Precision(dtype, dtype, dtype)


def _all_native(placement: Placement) -> bool:
    computed = (".self_attn", "_proj", ".mlp.experts", "lm_head")
    return placement.device == "cpu" and {b for s in computed for b in placement.used(s)} == {"native"}
