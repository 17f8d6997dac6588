"""GLM-4.5, 4.6 and 4.7: Qwen3-MoE's attention with half of each head rotated and norms that may be missing,
DeepSeek-V3's router, ungated shared experts, dense first layers. Defaults are those of transformers' Glm4MoeConfig. The
layer that predicts a second token (the last in files) is left out unless drafts are made by it."""

from __future__ import annotations

from typing import Any

from engine.architectures import gguf, hf
from engine.architectures.base import Architecture
from engine.architectures.config import LayerSpec, ModelConfig
from engine.architectures.fields import Fields
from engine.architectures.numbers import Numbers, extra_mtp
from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.mlp import Dense, Router, SharedExpert, Sparse
from rules import Family

_NAME, _GGUF = "glm4_moe", "glm4moe"
_DEFAULTS = hf.Defaults(
    vocab_size=151552,
    hidden_size=4096,
    num_hidden_layers=46,
    num_attention_heads=96,
    num_key_value_heads=8,
    intermediate_size=10944,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=1408,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    norm_topk_prob=True,
    partial_rotary_factor=0.5,
    first_dense=1,
)
_CLASSES = {
    "Glm4MoeModel": "model",
    "Glm4MoeDecoderLayer": "layer",
    "Glm4MoeAttention": "attention",
    "Glm4MoeMoE": "moe_block",
    "Glm4MoeExperts": "experts",
    "Glm4MoeMLP": "mlp",
    "Glm4MoeRMSNorm": "norm",
    "Glm4MoeRotaryEmbedding": "rope",
}


def _read_hf(fields: Fields, generation: Fields) -> ModelConfig:
    bias, normed = fields.boolean("attention_bias", False), fields.boolean("use_qk_norm", False)
    shared = fields.integer("n_shared_experts", 1, least=0)

    def layers(n: Numbers) -> tuple[LayerSpec, ...]:
        return _layers(n, hf.sigmoid_router(fields, n), bias=bias, normed=normed, shared=shared)

    count = fields.integer("num_hidden_layers", _DEFAULTS.num_hidden_layers)
    named = "num_mtp_layers" if fields.get("num_nextn_predict_layers") is None else "num_nextn_predict_layers"
    left_out = hf.extra_layers(fields, count, named, 1)
    return hf.config_of_hf(
        fields, generation, _DEFAULTS, architecture=_NAME, layers=layers, left_out=left_out,
        mtp=extra_mtp if left_out else None,
    )  # fmt: skip


def _read_gguf(file: gguf.GGUFModel) -> ModelConfig:
    """Weights are not normalised unless the file says so: llama.cpp's glm4moe."""
    normed, shared = "blk.0.attn_q_norm.weight" in file.tensors, file.fields.integer("expert_shared_count", 0, least=0)

    def layers(n: Numbers) -> tuple[LayerSpec, ...]:
        router = gguf.sigmoid_router(file, n)
        return _layers(n, router, bias=file.attention_bias, normed=normed, shared=shared)

    reads = (*gguf.SIGMOID_KEYS, gguf.PARTIAL_ROTATION, gguf.FIRST_DENSE, gguf.EXTRA_LAYERS, "expert_shared_count")
    return gguf.config_of_gguf(file, architecture=_NAME, norm_topk_prob=False, layers=layers, reads=reads)


def _layers(n: Numbers, router: Router, *, bias: bool, normed: bool, shared: int) -> tuple[LayerSpec, ...]:
    attention = GroupedQuery(
        n.num_attention_heads, n.num_key_value_heads, n.head_dim, n.rotation,
        bias=bias, qk_norm="head" if normed else "none",
    )  # fmt: skip
    width = n.moe_intermediate_size
    own = SharedExpert.ungated(shared, width) if shared else None
    sparse = Sparse(n.num_experts, n.num_experts_per_tok, width, router, own)
    return n.layers(attention, sparse, "post_attention_norm")


def _transformers(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    attention: Any = config.layers[0].attention
    fields: dict[str, Any] = {
        "first_k_dense_replace": config.num_hidden_layers - len(config.sparse_layers),
        "use_qk_norm": attention.qk_norm != "none",
        "num_nextn_predict_layers": len(config.left_out),
    }
    if experts is None:
        return fields
    shared, router = experts.shared, experts.router
    return fields | {
        "n_routed_experts": experts.experts,
        "n_shared_experts": 0 if shared is None else shared.mlp.intermediate // experts.intermediate,
        "routed_scaling_factor": router.scale,
        "n_group": router.groups,
        "topk_group": router.top_groups,
    }


GLM4_MOE = Architecture(
    name=_NAME,
    model_class="Glm4MoeForCausalLM",
    gguf=_GGUF,
    read_hf=_read_hf,
    read_gguf=_read_gguf,
    lora_targets=(*GroupedQuery.TARGETS, *Sparse.TARGETS, *Dense.TARGETS, *SharedExpert.UNGATED_TARGETS),
    own_fields=_transformers,
    rules=Family(
        classes=_CLASSES,
        packages=("transformers.models.glm4_moe.modeling_glm4_moe", "ktransformers.models.modeling_glm4_moe"),
    ),
)
