"""What the families with gated delta nets share. Torch-free."""

from __future__ import annotations

from engine.architectures.config import LayerSpec, LeftOut, ModelConfig
from engine.architectures.fields import Fields
from engine.architectures.hf import Defaults, config_of_hf
from engine.architectures.numbers import Numbers
from engine.architectures.parts.delta import DeltaNet
from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.mlp import Dense, SharedExpert, Sparse

MTP = LeftOut("multi-token prediction", "mtp.")
DELTA_TARGETS = (*GroupedQuery.TARGETS, *Sparse.TARGETS, *SharedExpert.TARGETS)  # beside the delta nets' own
_FULL_EVERY = 4


def delta_config_of_hf(
    fields: Fields,
    generation: Fields,
    defaults: Defaults,
    *,
    architecture: str,
    fused: bool,
    left_out: tuple[LeftOut, ...],
) -> ModelConfig:
    """`fused`: of the delta nets' projections. Raises ModelFileError."""
    delta = DeltaNet(
        key_heads=fields.integer("linear_num_key_heads", 16),
        value_heads=fields.integer("linear_num_value_heads", 32),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        kernel=fields.integer("linear_conv_kernel_dim", 4, least=2),
        fused=fused,
    )
    if delta.value_heads % delta.key_heads:
        raise fields.error(
            "linear_num_value_heads",
            f"is {delta.value_heads}, not a multiple of linear_num_key_heads {delta.key_heads}",
        )
    bias = fields.boolean("attention_bias", False)
    shared = SharedExpert.of(fields.integer("shared_expert_intermediate_size", 512))

    def layers(n: Numbers) -> tuple[LayerSpec, ...]:
        full = GroupedQuery(
            n.num_attention_heads, n.num_key_value_heads, n.head_dim, n.rotation,
            bias=bias, output_bias=bias, qk_norm="head", gated=True,
        )  # fmt: skip
        sparse = Sparse(n.num_experts, n.num_experts_per_tok, n.moe_intermediate_size, n.router, shared)
        dense, linear = Dense(n.intermediate_size), _linear(fields, n.num_hidden_layers)
        return tuple(
            LayerSpec(delta if keeps else full, sparse if routed else dense, "post_attention_norm")
            for keeps, routed in zip(linear, n.sparse, strict=True)
        )

    return config_of_hf(
        fields, generation, defaults, architecture=architecture, layers=layers, left_out=left_out, norms_less_one=True
    )


def _linear(fields: Fields, count: int) -> list[bool]:
    """By layer: whether its attention is a delta net. At least one is not: positions are kept in blocks of keys."""
    kinds = fields.get("layer_types")
    if kinds is None:
        every = fields.integer("full_attention_interval", _FULL_EVERY)
        linear = [bool((layer + 1) % every) for layer in range(count)]
    else:
        linear = [kind == "linear_attention" for kind in kinds]
    if len(linear) != count:
        raise fields.error("layer_types", f"names {len(linear)} layers of {count}")
    if all(linear):
        raise fields.error("layer_types", "has no layer of full_attention; at least one is needed")
    return linear
