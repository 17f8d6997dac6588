"""In which type activations, unquantised weights and the KV cache are held."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.config import EngineConfig
from engine.errors import UserError
from engine.planning.placement import Placement, activation_dtype

KV_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
_NEEDS = {"fp8": "a GPU with flashinfer", "int8": "the native attention, on a CPU"}


@dataclass(frozen=True)
class Precision:
    activations: torch.dtype  # the residual stream and all that is computed from it
    weights: torch.dtype  # unquantised projections and experts, the embedding
    kv: torch.dtype


def choose_precision(config: EngineConfig, placement: Placement) -> Precision:
    """`dtype` "float32" and "bfloat16" hold everything so. "auto" is bfloat16, but where the native kernels compute
    everything activations stay float32: they are few, and rounding them is what costs accuracy.

    `kv_cache_dtype` sets the cache's apart; UserError if the attention cannot hold it."""
    if config.dtype == "auto" and placement.native(".self_attn", "_proj", ".mlp.experts", "lm_head"):
        chosen = Precision(torch.float32, torch.bfloat16, torch.bfloat16)
    else:
        dtype = activation_dtype(config)
        chosen = Precision(dtype, dtype, dtype)
    if config.kv_cache_dtype == "auto":
        return chosen
    for backend in placement.used(".self_attn"):
        allowed = _kv_names(backend, chosen.activations)
        if config.kv_cache_dtype not in allowed:
            rows = str(chosen.activations).removeprefix("torch.")
            needs = _NEEDS.get(config.kv_cache_dtype)
            where = f"; {config.kv_cache_dtype} needs {needs}" if needs else ""
            raise UserError(
                f"--kv-cache-dtype {config.kv_cache_dtype}: attention by {backend} with {rows} rows takes auto, "
                f"{', '.join(allowed)}{where}",
                field="kv_cache_dtype",
            )
    return replace(chosen, kv=KV_DTYPES[config.kv_cache_dtype])


def _kv_names(backend: str, rows: torch.dtype) -> list[str]:
    """What an attention backend can hold beside rows of a type."""
    own = str(rows).removeprefix("torch.")
    if backend == "native":
        return list(dict.fromkeys([own, "bfloat16", "int8"]))
    return [own, "fp8"] if backend == "flashinfer" else [own]
