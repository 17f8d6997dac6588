"""Fine-tuning of LoRA over the very experts that are served: `ktserve train`.

KTransformers' names are importable from here; what needs torch is imported when it is first asked for, so that reading
settings never does.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "load_kt_model": "model", "init_cpu_infer": "model", "wrap_moe_layers_with_amx": "model",
    "get_moe_arch_config": "families", "MOEArchConfig": "families",
    "get_kt_lora_params": "adapters", "update_kt_lora_pointers": "adapters",
    "load_moe_lora_from_adapter": "adapters", "save_moe_lora_to_adapter": "adapters",
    "MOELayerWrapper": "wrapper", "MOEAMXFunction": "wrapper",
    "KTAMXError": "errors", "KTAMXNotAvailableError": "errors", "KTAMXModelNotSupportedError": "errors",
    "KTAMXConfigError": "errors", "KTAMXForwardError": "errors", "KTAMXBackwardError": "errors",
}  # fmt: skip
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"training.kt.{_PLACES[name]}"), name)
