"""Qwen3-MoE: routed experts, a norm on each head's query and key. Defaults are those of transformers' Qwen3MoeConfig;
where GGUF metadata is silent, what llama.cpp's qwen3moe graph does holds (the experts' weights sum to 1)."""

from __future__ import annotations

from functools import partial

from engine.architectures.base import Architecture
from engine.architectures.config import LayerSpec, ModelConfig
from engine.architectures.fields import Fields
from engine.architectures.gguf import GGUFModel, config_of_gguf
from engine.architectures.hf import Defaults, config_of_hf
from engine.architectures.numbers import Numbers
from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.mlp import Dense, Sparse
from rules import Family, named_after

_NAME, _GGUF = "qwen3_moe", "qwen3moe"
_DEFAULTS = Defaults(
    hidden_size=2048,
    num_attention_heads=32,
    num_key_value_heads=4,
    intermediate_size=6144,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
)
_KT = "ktransformers.operators."


def _read_hf(fields: Fields, generation: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    layers = partial(_layers, bias=bias)
    return config_of_hf(fields, generation, _DEFAULTS, architecture=_NAME, layers=layers)


def _read_gguf(file: GGUFModel) -> ModelConfig:
    layers = partial(_layers, bias=file.attention_bias)
    return config_of_gguf(file, architecture=_NAME, norm_topk_prob=True, layers=layers)


def _layers(n: Numbers, *, bias: bool) -> tuple[LayerSpec, ...]:
    attention = GroupedQuery(
        n.num_attention_heads, n.num_key_value_heads, n.head_dim, n.rotation,
        bias=bias, output_bias=bias, qk_norm="head",
    )  # fmt: skip
    return n.layers(attention, Sparse(n.num_experts, n.num_experts_per_tok, n.moe_intermediate_size, n.router))


QWEN3_MOE = Architecture(
    name=_NAME,
    model_class="Qwen3MoeForCausalLM",
    gguf=_GGUF,
    read_hf=_read_hf,
    read_gguf=_read_gguf,
    lora_targets=(*GroupedQuery.TARGETS, *Sparse.TARGETS, *Dense.TARGETS),
    rules=Family(
        classes=named_after("Qwen3Moe"),
        packages=("transformers.models.qwen3_moe.modeling_qwen3_moe", "ktransformers.models.modeling_qwen3_moe"),
        # KTransformers meets other classes in this model: the rotary one of its predecessor
        aliases={
            "Qwen2MoeRotaryEmbedding": "Qwen3MoeRotaryEmbedding",
            "ktransformers.models.modeling_qwen2_moe.Qwen2MoeRotaryEmbedding": "Qwen3MoeRotaryEmbedding",
        },
        operators={
            f"{_KT}experts.KQwen3MoeSparseMoeBlock": "moe_block",
            f"{_KT}experts.KQwen3MoeSparseMoeBlockV2": "moe_block",
            f"{_KT}attention.KQwen3MoeAttention": "attention",
            f"{_KT}balance_serve_attention.KQwen3MoeAttention": "attention",
            f"{_KT}layernorm.KQwen3MoeRMSNorm": "norm",
            f"{_KT}RoPE.KQwen3MoeRotaryEmbedding": "rope",
            f"{_KT}mlp.KQwen2MoeMLP": "mlp",
            f"{_KT}models.KQwen2MoeModel": "model",
            f"{_KT}models.KQwen3MoeModel": "model",
        },
    ),
)
