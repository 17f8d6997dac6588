"""MiniMax-M2 (M2, M2.1, M2.5): Mixtral's names of modules; a norm over all queries, and over all keys, of a layer;
part of each head rotated; a router of sigmoids whose bias chooses. Defaults are those of transformers'
MiniMaxM2Config."""

from __future__ import annotations

from dataclasses import replace

from engine.architectures import gguf, hf
from engine.architectures.base import Architecture
from engine.architectures.config import LayerSpec, ModelConfig
from engine.architectures.fields import Fields
from engine.architectures.names import StoredNames
from engine.architectures.numbers import Numbers, extra_layer
from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.mlp import Router, Sparse
from rules import Family, named_after

_NAME, _GGUF = "minimax_m2", "minimax-m2"
_STORED = StoredNames(
    (
        ("block_sparse_moe", "mlp"),
        ("experts.*.w1", "experts.*.gate_proj"),
        ("experts.*.w2", "experts.*.down_proj"),
        ("experts.*.w3", "experts.*.up_proj"),
    )
)
_DEFAULTS = hf.Defaults(
    vocab_size=200064,
    hidden_size=3072,
    num_hidden_layers=62,
    num_attention_heads=48,
    num_key_value_heads=8,
    intermediate_size=1536,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=None,
    max_position_embeddings=196608,
    rope_theta=5e6,
    head_dim=128,
    partial_rotary_factor=1.0,
)
_ROUTER = Router(score="sigmoid", normalise=0.0, bias=True)


def _read_hf(fields: Fields, generation: Fields) -> ModelConfig:
    """Released files give `rotary_dim`, and say of each layer's kind of attention 1: that of all."""
    kinds = fields.get("attn_type_list", [])
    if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
        raise fields.error("attn_type_list", "holds a kind other than 1; layers of full attention can be served")
    if not fields.boolean("use_qk_norm", True) or fields.text("qk_norm_type", "per_layer") != "per_layer":
        raise fields.error("qk_norm_type", "and use_qk_norm: a norm over all heads (per_layer) can be served")
    if fields.text("scoring_func", "sigmoid") != "sigmoid" or not fields.boolean("use_routing_bias", True):
        raise fields.error("scoring_func", "and use_routing_bias: sigmoids with a bias can be served")
    if fields.integer("shared_intermediate_size", 0, least=0):
        raise fields.error("shared_intermediate_size", "is set; layers without a shared expert can be served")
    if fields.get("rotary_dim") is not None:
        head = fields.integer("head_dim", _DEFAULTS.head_dim)
        fields = Fields(
            {"partial_rotary_factor": fields.integer("rotary_dim") / head, **fields.values}, fields.where, fields.joint
        )
    count = fields.integer("num_hidden_layers", _DEFAULTS.num_hidden_layers)
    extra = fields.integer("num_mtp_modules", 0, least=0) * fields.integer("mtp_transformer_layers", 1)
    extra = extra if fields.boolean("use_mtp", False) else 0
    config = hf.config_of_hf(fields, generation, _DEFAULTS, architecture=_NAME, layers=_layers)
    return replace(config, left_out=tuple(extra_layer(count + layer) for layer in range(extra)))


def _read_gguf(file: gguf.GGUFModel) -> ModelConfig:
    def layers(n: Numbers) -> tuple[LayerSpec, ...]:
        router = gguf.sigmoid_router(file, n, epsilon=0.0)
        if router != replace(_ROUTER, group_score=router.group_score):
            raise file.fields.error(
                "expert_weights_scale", "or a group is set; weights of chosen experts sum to 1 here"
            )
        return _layers(n)

    reads = (*gguf.SIGMOID_KEYS, gguf.PARTIAL_ROTATION)
    return gguf.config_of_gguf(
        file, architecture=_NAME, norm_topk_prob=True, layers=layers, divided=False, reads=reads
    )  # fmt: skip


def _layers(n: Numbers) -> tuple[LayerSpec, ...]:
    attention = GroupedQuery(
        n.num_attention_heads, n.num_key_value_heads, n.head_dim, n.rotation, qk_norm="whole"
    )  # fmt: skip
    sparse = Sparse(
        n.num_experts, n.num_experts_per_tok, n.moe_intermediate_size, _ROUTER,
        size="intermediate_size", bias_name="mlp.e_score_correction_bias",
    )  # fmt: skip
    return n.layers(attention, sparse)


MINIMAX_M2 = Architecture(
    name=_NAME,
    model_class="MiniMaxM2ForCausalLM",
    gguf=_GGUF,
    read_hf=_read_hf,
    read_gguf=_read_gguf,
    lora_targets=(*GroupedQuery.TARGETS, *Sparse.TARGETS),
    stored_names=_STORED,
    own_fields=lambda config: {"num_local_experts": config.num_experts},
    rules=Family(
        classes={name: kind for name, kind in named_after("MiniMaxM2").items() if kind != "mlp"},
        packages=("transformers.models.minimax_m2.modeling_minimax_m2", "ktransformers.models.modeling_minimax_m2"),
        stored_name=_STORED.stored,
    ),
)
