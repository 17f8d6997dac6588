"""The families of transformers whose routed experts can be replaced. Torch-free.

Their experts are one module with gate_up_proj [E, 2 I, H] and down_proj [E, H, I], called with (hidden [T, H], ids
[T, k], weights [T, k]); attention, routers and shared experts stay transformers' own. A family is added by its name and
its fields, once the gradients of a small model of it equal autograd's (tests/training/test_kt.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from training.kt.errors import KTAMXModelNotSupportedError


@dataclass(frozen=True)
class Family:
    """`block`: a decoder layer's module that holds the experts, as `experts`; the rest: fields of its config."""

    block: str
    num_experts: str
    intermediate_size: str


FAMILIES = {
    "qwen3_moe": Family("mlp", "num_experts", "moe_intermediate_size"),
    "qwen2_moe": Family("mlp", "num_experts", "moe_intermediate_size"),
    "mixtral": Family("mlp", "num_local_experts", "intermediate_size"),
    "deepseek_v2": Family("mlp", "n_routed_experts", "moe_intermediate_size"),
    "deepseek_v3": Family("mlp", "n_routed_experts", "moe_intermediate_size"),
}


def family_of(config: Any) -> Family:
    """By a transformers config's model_type. KTAMXModelNotSupportedError with the list of those that work."""
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        raise KTAMXModelNotSupportedError(f"model_type is {kind}; supported are {', '.join(FAMILIES)}", "model_type")
    if getattr(config, "hidden_act", "silu") != "silu":
        raise KTAMXModelNotSupportedError(f"hidden_act is {config.hidden_act}; supported is silu", "hidden_act")
    return FAMILIES[kind]
