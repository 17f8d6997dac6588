"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): routed experts and one shared expert behind a sigmoid gate; biases on
q, k and v. Defaults are those of transformers' Qwen2MoeConfig; where GGUF metadata is silent, what llama.cpp's qwen2moe
graph does holds (the experts' weights are not renormalised)."""

from __future__ import annotations

from functools import partial

from engine.architectures.base import Architecture
from engine.architectures.config import LayerSpec, ModelConfig
from engine.architectures.fields import Fields
from engine.architectures.gguf import GGUFModel, config_of_gguf
from engine.architectures.hf import Defaults, config_of_hf
from engine.architectures.numbers import Numbers
from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.mlp import Dense, SharedExpert, Sparse
from rules import Family, named_after

_NAME, _GGUF = "qwen2_moe", "qwen2moe"
_DEFAULTS = Defaults(
    hidden_size=2048,
    num_attention_heads=16,
    num_key_value_heads=16,
    intermediate_size=5632,
    num_experts=60,
    num_experts_per_tok=4,
    moe_intermediate_size=1408,
)
_KT = "ktransformers.operators."


def _read_hf(fields: Fields, generation: Fields) -> ModelConfig:
    bias, shared = fields.boolean("qkv_bias", True), fields.integer("shared_expert_intermediate_size", 5632)
    layers = partial(_layers, bias=bias, shared=shared)
    return config_of_hf(fields, generation, _DEFAULTS, architecture=_NAME, layers=layers)


def _read_gguf(file: GGUFModel) -> ModelConfig:
    """A shared expert whose size is not stored is as wide as `feed_forward_length`."""
    forward = file.fields.integer("feed_forward_length", 0, least=0)
    shared = file.fields.integer("expert_shared_feed_forward_length", forward)
    layers = partial(_layers, bias=file.attention_bias, shared=shared)
    return config_of_gguf(file, architecture=_NAME, norm_topk_prob=False, layers=layers, shared_expert=True)


def _layers(n: Numbers, *, bias: bool, shared: int) -> tuple[LayerSpec, ...]:
    attention = GroupedQuery(n.num_attention_heads, n.num_key_value_heads, n.head_dim, n.rotation, bias=bias)
    experts = (n.num_experts, n.num_experts_per_tok, n.moe_intermediate_size)
    return n.layers(attention, Sparse(*experts, n.router, SharedExpert.of(shared)))


QWEN2_MOE = Architecture(
    name=_NAME,
    model_class="Qwen2MoeForCausalLM",
    gguf=_GGUF,
    read_hf=_read_hf,
    read_gguf=_read_gguf,
    lora_targets=(
        *GroupedQuery.TARGETS,
        *Sparse.TARGETS,
        *Dense.TARGETS,
        *SharedExpert.TARGETS,
    ),
    rules=Family(
        classes=named_after("Qwen2Moe"),
        packages=("transformers.models.qwen2_moe.modeling_qwen2_moe", "ktransformers.models.modeling_qwen2_moe"),
        operators={
            f"{_KT}experts.KQwen2MoeSparseMoeBlock": "moe_block",
            f"{_KT}experts.KQwen2MoeSparseMoeBlockV2": "moe_block",
            f"{_KT}balance_serve_attention.KQwen2MoeAttention": "attention",
            f"{_KT}layernorm.KQwen2MoeRMSNorm": "norm",
            f"{_KT}mlp.KQwen2MoeMLP": "mlp",
            f"{_KT}models.KQwen2MoeModel": "model",
        },
    ),
)
