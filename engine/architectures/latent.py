"""What families of latent attention share: dense layers before those with routed experts, shared experts without a
gate. Torch-free.

GGUF has latent attention in llama.cpp's absorbed form, one KV head of kv_rank + rope values, whose head sizes are under
keys of their own; older files have the expanded one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from engine.architectures.config import LayerSpec, ModelConfig
from engine.architectures.fields import Fields
from engine.architectures.gguf import EXTRA_LAYERS, GGUFModel, config_of_gguf, float32
from engine.architectures.hf import Defaults
from engine.architectures.numbers import Numbers
from engine.architectures.parts.mla import Latent
from engine.architectures.parts.mlp import Dense, Router, SharedExpert, Sparse
from engine.architectures.parts.rotation import Rotation
from engine.errors import shown

TARGETS = (*Latent.TARGETS, *Sparse.TARGETS, *Dense.TARGETS, *SharedExpert.UNGATED_TARGETS)


@dataclass(frozen=True)
class LatentSizes:
    """Of latent attention, and what there is beside routed experts."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    bias: bool
    interleaved: bool
    shared: int  # experts


def latent_sizes(
    fields: Fields, shared: int, interleaved: bool, *, q_rank: int = 1536, nope: int = 128, value: int = 128
) -> LatentSizes:
    """`q_rank`, `nope`, `value`: of absent fields; a q_lora_rank of null means that queries have one projection."""
    ranked = fields.values.get("q_lora_rank", q_rank) is not None
    return LatentSizes(
        q_rank=fields.integer("q_lora_rank", q_rank) if ranked else None,
        kv_rank=fields.integer("kv_lora_rank", 512),
        nope_dim=fields.integer("qk_nope_head_dim", nope),
        rope_dim=even(fields, "qk_rope_head_dim", 64),
        value_dim=fields.integer("v_head_dim", value),
        bias=fields.boolean("attention_bias", False),
        interleaved=interleaved,
        shared=fields.integer("n_shared_experts", shared),
    )


def even(fields: Fields, name: str, default: int | None) -> int:
    """Without a `default` the field must be there."""
    value = fields.integer(name, least=2) if default is None else fields.integer(name, default, least=2)
    if value % 2:
        raise fields.error(name, f"is {value}; rotary embedding needs an even number")
    return value


def common_fields(fields: Fields, defaults: Defaults, dense: int) -> Fields:
    """The same under the names that families share. `dense`: first_k_dense_replace where it is absent."""
    heads = fields.integer("num_attention_heads", defaults.num_attention_heads)
    if fields.integer("num_key_value_heads", heads) != heads:
        raise fields.error(
            "num_key_value_heads", f"is {fields.get('num_key_value_heads')}; all {heads} heads have keys"
        )
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.error("moe_layer_freq", f"is {fields.get('moe_layer_freq')}; only 1 can be served")
    count = fields.integer("num_hidden_layers", defaults.num_hidden_layers)
    first = min(fields.integer("first_k_dense_replace", dense, least=0), count)
    own = {
        "head_dim": even(fields, "qk_rope_head_dim", 64),
        "num_key_value_heads": heads,
        "num_experts": fields.integer("n_routed_experts", defaults.num_experts),
        "mlp_only_layers": list(range(first)),
        "norm_topk_prob": False,  # the routers here have their own
    }
    return Fields({**fields.values, **own}, fields.where)


def latent_layers(n: Numbers, sizes: LatentSizes, router: Router) -> tuple[LayerSpec, ...]:
    attention = Latent(
        n.num_attention_heads, sizes.q_rank, sizes.kv_rank, sizes.nope_dim, sizes.value_dim,
        replace(n.rotation, dim=sizes.rope_dim), sizes.interleaved, sizes.bias,
    )  # fmt: skip
    width = n.moe_intermediate_size
    sparse = Sparse(n.num_experts, n.num_experts_per_tok, width, router, SharedExpert.ungated(sizes.shared, width))
    return n.layers(attention, sparse)


def latent_fields(config: ModelConfig) -> dict[str, Any]:
    """Of config.json, for transformers."""
    attention, experts = config.layers[0].attention, config.experts
    if not isinstance(attention, Latent) or experts is None or experts.shared is None:
        raise TypeError(f"{config.architecture} has latent attention and shared experts")
    router, width = experts.router, experts.intermediate
    return {
        "q_lora_rank": attention.q_rank,
        "num_key_value_heads": attention.heads,
        "rope_interleave": attention.interleaved,
        "n_routed_experts": experts.experts,
        "n_shared_experts": experts.shared.mlp.intermediate // width,
        "first_k_dense_replace": config.sparse_layers[0],
        "routed_scaling_factor": router.scale,
        "n_group": router.groups,
        "topk_group": router.top_groups,
        "num_nextn_predict_layers": len(config.left_out),
    }


def checked_router(fields: Fields, router: Router, defaults: Defaults) -> Router:
    experts = fields.integer("n_routed_experts", defaults.num_experts)
    if problem := router.check(experts, fields.integer("num_experts_per_tok", defaults.num_experts_per_tok)):
        name, _, rest = problem.partition(" ")
        raise fields.error(name, rest)
    return router


SOFTMAX, SIGMOID = 1, 2  # expert_gating_func
_READ_HERE = (  # keys that are not read as other families' are
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "expert_gating_func",
    "expert_group_count",
    "expert_group_used_count",
    "expert_shared_count",
    "expert_weights_norm",
    "expert_weights_scale",
    "leading_dense_block_count",
    "rope.scaling.yarn_log_multiplier",
)


def gating(file: GGUFModel) -> int:
    """SOFTMAX, which an absent key means, or SIGMOID."""
    found = file.fields.integer("expert_gating_func", 0, least=0) or SOFTMAX
    if found not in (SOFTMAX, SIGMOID):
        raise file.fields.error("expert_gating_func", f"is {found}; allowed is {SOFTMAX} or {SIGMOID}")
    return found


def latent_config_of_gguf(file: GGUFModel, architecture: str, router: Callable[[GGUFModel], Router]) -> ModelConfig:
    """`router`: what the family makes of the file's; its groups are read here. Raises ModelFileError."""
    fields, rope = file.fields, even(file.fields, "rope.dimension_count", None)
    absorbed = fields.get("attention.key_length_mla") is not None
    ending = "_mla" if absorbed else ""
    nope = fields.integer(f"attention.key_length{ending}") - rope
    if nope < 1:
        name = f"attention.key_length{ending}"
        raise fields.error(name, f"is {nope + rope}; allowed is more than the rotated {rope}")
    ranked = fields.get("attention.q_lora_rank") not in (None, 0)
    sizes = LatentSizes(
        q_rank=fields.integer("attention.q_lora_rank") if ranked else None,
        kv_rank=fields.integer("attention.kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=fields.integer(f"attention.value_length{ending}"),
        bias="blk.0.attn_kv_a_mqa.bias" in file.tensors,
        interleaved=True,
        shared=fields.integer("expert_shared_count"),
    )
    made = replace(
        router(file),
        scale=float32(fields.number("expert_weights_scale", 1.0)),
        groups=fields.integer("expert_group_count", 0, least=0) or 1,
        top_groups=fields.integer("expert_group_used_count", 0, least=0) or 1,
    )
    if problem := made.check(fields.integer("expert_count"), fields.integer("expert_used_count")):
        raise fields.error("expert_group_count", f"does not go with the others: {problem}")
    own = {f"{file.architecture}.{name}" for name in _READ_HERE}
    heads = f"{file.architecture}.attention.head_count"
    shared = {key: value for key, value in file.metadata.items() if key not in own}
    shared |= {f"{heads}_kv": file.metadata.get(heads), f"{file.architecture}.attention.key_length": rope}
    common = dataclasses.replace(file, metadata=shared)
    dense = fields.integer("leading_dense_block_count", 0, least=0)

    def layers(n: Numbers) -> tuple[LayerSpec, ...]:
        if n.sparse != tuple(layer >= dense for layer in range(n.num_hidden_layers)):
            raise fields.error("leading_dense_block_count", f"is {dense}; other layers have a dense MLP")
        return latent_layers(replace(n, rotation=_rotation_of_gguf(file, n.rotation)), sizes, made)

    return config_of_gguf(common, architecture=architecture, norm_topk_prob=False, layers=layers, reads=(EXTRA_LAYERS,))


def _rotation_of_gguf(file: GGUFModel, rotation: Rotation) -> Rotation:
    """llama.cpp leaves cosines and sines as they are, and scales queries and keys by what the key says, which is 0.1
    mscale_all_dim. A model without mscale_all_dim has yarn's usual factor on cosines and sines, though llama.cpp scales
    its queries and keys as well: it counts on the key."""
    scaling = rotation.scaling
    weight = float32(file.fields.number("rope.scaling.yarn_log_multiplier", 0.0, above=-1e-9))
    if scaling is None or scaling.kind != "yarn":
        if weight:
            raise file.fields.error("rope.scaling.yarn_log_multiplier", f"is {shown(weight)} without yarn")
        return rotation
    if not weight:
        return rotation
    each = round(10 * weight, 6)
    return replace(rotation, scaling=replace(scaling, extra={"mscale": each, "mscale_all_dim": each}))
