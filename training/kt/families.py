"""The families of transformers whose routed experts can be replaced. Torch-free.

Their experts are one module with gate_up_proj [E, 2 I, H] and down_proj [E, H, I], called with (hidden [T, H], ids
[T, k], weights [T, k]); attention, routers and shared experts stay transformers' own. A family is added by its name and
its fields, once the gradients of a small model of it equal autograd's (tests/training/test_kt.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from training.kt.errors import KTAMXModelNotSupportedError


@dataclass(frozen=True)
class Family:
    """`block`: a decoder layer's module that holds the experts, as `experts`; the rest: fields of its config.
    `shared`: of the one that says whether there are shared experts."""

    block: str
    num_experts: str
    intermediate_size: str
    shared: str | None = None
    router_type: str = "linear"


@dataclass(frozen=True)
class MOEArchConfig:
    """A model's mixture of experts under KTransformers' names."""

    moe_layer_attr: str
    router_attr: str
    experts_attr: str
    weight_names: tuple[str, str, str]
    expert_num: int
    intermediate_size: int
    num_experts_per_tok: int
    has_shared_experts: bool
    router_type: str


_QWEN = Family("mlp", "num_experts", "moe_intermediate_size")
_DEEPSEEK = Family("mlp", "n_routed_experts", "moe_intermediate_size", "n_shared_experts", "deepseek_gate")
FAMILIES = {
    "qwen3_moe": _QWEN,
    "qwen2_moe": replace(_QWEN, shared="shared_expert_intermediate_size"),
    "mixtral": Family("mlp", "num_local_experts", "intermediate_size"),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": replace(_DEEPSEEK, router_type="linear"),
    "minimax_m2": Family("mlp", "num_local_experts", "intermediate_size"),
}


def family_of(config: Any) -> Family:
    """By a transformers config's model_type. KTAMXModelNotSupportedError with the list of those that work."""
    kind = getattr(type(config), "model_type", None)
    if kind not in FAMILIES:
        raise KTAMXModelNotSupportedError(f"model_type is {kind}; supported are {', '.join(FAMILIES)}", "model_type")
    if getattr(config, "hidden_act", "silu") != "silu":
        raise KTAMXModelNotSupportedError(f"hidden_act is {config.hidden_act}; supported is silu", "hidden_act")
    return FAMILIES[kind]


def get_moe_arch_config(config: Any) -> MOEArchConfig:
    """Of a transformers config. KTAMXModelNotSupportedError."""
    family = family_of(config)
    return MOEArchConfig(
        moe_layer_attr=family.block,
        router_attr="gate",
        experts_attr="experts",
        weight_names=("gate_proj", "up_proj", "down_proj"),
        expert_num=getattr(config, family.num_experts),
        intermediate_size=getattr(config, family.intermediate_size),
        num_experts_per_tok=config.num_experts_per_tok,
        has_shared_experts=family.shared is not None and bool(getattr(config, family.shared, 0)),
        router_type=family.router_type,
    )
