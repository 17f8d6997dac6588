"""What the families with gated delta nets share. Torch-free."""

from __future__ import annotations

from engine.architectures.config import LayerSpec, LeftOut, ModelConfig, Mtp
from engine.architectures.fields import Fields
from engine.architectures.gguf import EXTRA_LAYERS, PARTIAL_ROTATION, GGUFModel, config_of_gguf
from engine.architectures.hf import Defaults, config_of_hf
from engine.architectures.names import StoredNames
from engine.architectures.numbers import Numbers, mtp_of
from engine.architectures.parts.delta import DeltaNet
from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.mlp import Dense, SharedExpert, Sparse
from engine.errors import ModelFileError

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
        fused_gates=fused,
    )
    if delta.value_heads % delta.key_heads:
        raise fields.error(
            "linear_num_value_heads",
            f"is {delta.value_heads}, not a multiple of linear_num_key_heads {delta.key_heads}",
        )
    bias = fields.boolean("attention_bias", False)
    dedicated = fields.boolean("mtp_use_dedicated_embeddings", False)  # no released model has these
    shared = SharedExpert.of(fields.integer("shared_expert_intermediate_size", 512))

    def layers(n: Numbers) -> tuple[LayerSpec, ...]:
        return _layers(n, delta, _linear(fields, n.num_hidden_layers), shared, bias)

    return config_of_hf(
        fields, generation, defaults, architecture=architecture, layers=layers, left_out=left_out, norms_minus_one=True,
        mtp=_mtp if MTP in left_out and not dedicated else None,
    )  # fmt: skip


def delta_config_of_gguf(file: GGUFModel, *, architecture: str, fused_gates: bool) -> ModelConfig:
    """Of llama.cpp's names and order of heads: layers are what their tensors say. Raises ModelFileError."""
    fields = file.fields
    heads, inner = fields.integer("ssm.time_step_rank"), fields.integer("ssm.inner_size")
    keys = fields.integer("ssm.group_count")
    if heads % keys:
        raise fields.error("ssm.time_step_rank", f"is {heads}, not a multiple of ssm.group_count {keys}")
    if inner % heads:
        raise fields.error("ssm.inner_size", f"is {inner}, not a multiple of ssm.time_step_rank {heads}")
    delta = DeltaNet(
        key_heads=keys,
        value_heads=heads,
        key_dim=fields.integer("ssm.state_size"),
        value_dim=inner // heads,
        kernel=fields.integer("ssm.conv_kernel", least=2),
        fused=fused_gates and any(name.endswith(".ssm_in.weight") for name in file.tensors),  # early files
        fused_gates=fused_gates,
        tiled=not fused_gates and heads > keys,
    )
    shared = SharedExpert.of(fields.integer("expert_shared_feed_forward_length"))

    def layers(n: Numbers) -> tuple[LayerSpec, ...]:
        linear = [f"blk.{layer}.ssm_conv1d.weight" in file.tensors for layer in range(n.num_hidden_layers)]
        if all(linear):
            raise ModelFileError(f"{file.where}: no layer has full attention; at least one is needed", "model")
        return _layers(n, delta, linear, shared, bias=False)

    return config_of_gguf(
        file, architecture=architecture, norm_topk_prob=True, layers=layers, shared_expert=True,
        reads=(PARTIAL_ROTATION, EXTRA_LAYERS),
    )  # fmt: skip


def _layers(
    n: Numbers, delta: DeltaNet, linear: list[bool], shared: SharedExpert | None, bias: bool
) -> tuple[LayerSpec, ...]:
    full = GroupedQuery(
        n.num_attention_heads, n.num_key_value_heads, n.head_dim, n.rotation,
        bias=bias, output_bias=bias, qk_norm="head", gated=True,
    )  # fmt: skip
    sparse = Sparse(n.num_experts, n.num_experts_per_tok, n.moe_intermediate_size, n.router, shared)
    dense = Dense(n.intermediate_size)
    return tuple(
        LayerSpec(delta if keeps else full, sparse if routed else dense, "post_attention_norm")
        for keeps, routed in zip(linear, n.sparse, strict=True)
    )


def _mtp(layers: tuple[LayerSpec, ...]) -> Mtp:
    here = f"model.layers.{len(layers)}"
    modules = {"layers.0": "", "fc": ".eh_proj", "pre_fc_norm_embedding": ".enorm", "pre_fc_norm_hidden": ".hnorm"}
    modules["norm"] = ".shared_head.norm"
    return mtp_of(layers, MTP, StoredNames(tuple((f"mtp.{name}", f"{here}{own}") for name, own in modules.items())))


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
