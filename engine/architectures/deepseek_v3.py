"""DeepSeek V3, R1, V3.1, and Kimi K2, which is one of other sizes. Defaults are those of transformers'
DeepseekV3Config."""

from __future__ import annotations

from engine.architectures.base import Architecture
from engine.architectures.config import ModelConfig
from engine.architectures.fields import Fields
from engine.architectures.gguf import GGUFModel
from engine.architectures.hf import Defaults, config_of_hf, extra_layers
from engine.architectures.latent import (
    SIGMOID,
    TARGETS,
    checked_router,
    common_fields,
    gating,
    latent_config_of_gguf,
    latent_fields,
    latent_layers,
    latent_sizes,
)
from engine.architectures.numbers import extra_mtp
from engine.architectures.parts.mlp import Router
from engine.errors import shown
from rules import Family

_NAME = "deepseek_v3"
_DEFAULTS = Defaults(
    vocab_size=129280,
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=128,
    num_key_value_heads=128,
    intermediate_size=18432,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    max_position_embeddings=4096,
)
SUM_EPS = 1e-20  # beside the sum of chosen experts' weights
_KT = "ktransformers.operators."


def _read_hf(fields: Fields, generation: Fields) -> ModelConfig:
    return read_layers(fields, generation, _NAME)


def read_layers(fields: Fields, generation: Fields, architecture: str) -> ModelConfig:
    """Of any family with these layers: a sigmoid of each expert, a bias of the choice, groups by their two best."""
    if (score := fields.text("scoring_func", "sigmoid")) != "sigmoid":
        raise fields.error("scoring_func", f"is {shown(score)}; DeepSeek V3 has sigmoid")
    if (method := fields.text("topk_method", "noaux_tc")) != "noaux_tc":
        raise fields.error("topk_method", f"is {shown(method)}; DeepSeek V3 has noaux_tc")
    router = Router(
        "sigmoid",
        normalise=SUM_EPS if fields.boolean("norm_topk_prob", True) else None,
        scale=fields.number("routed_scaling_factor", 2.5),
        bias=True,
        groups=fields.integer("n_group", 8),
        top_groups=fields.integer("topk_group", 4),
        group_score="top2",
    )
    sizes = latent_sizes(fields, shared=1, interleaved=fields.boolean("rope_interleave", True))
    router = checked_router(fields, router, _DEFAULTS)
    count = fields.integer("num_hidden_layers", _DEFAULTS.num_hidden_layers)
    extra = extra_layers(fields, count, "num_nextn_predict_layers", 0)
    return config_of_hf(
        common_fields(fields, _DEFAULTS, dense=3), generation, _DEFAULTS,
        architecture=architecture, layers=lambda n: latent_layers(n, sizes, router),
        left_out=extra, mtp=extra_mtp if extra else None,
    )  # fmt: skip


def _read_gguf(file: GGUFModel) -> ModelConfig:
    return latent_config_of_gguf(file, _NAME, router_of_gguf)


def router_of_gguf(file: GGUFModel) -> Router:
    """Without its scale and groups."""
    normalise = SUM_EPS if file.fields.boolean("expert_weights_norm", False) else None
    bias = any(name.endswith("exp_probs_b.bias") for name in file.tensors)
    return Router("sigmoid", normalise=normalise, bias=bias, group_score="top2")


DEEPSEEK_V3 = Architecture(
    name=_NAME,
    model_class="DeepseekV3ForCausalLM",
    gguf="deepseek2",
    read_hf=_read_hf,
    read_gguf=_read_gguf,
    own_fields=latent_fields,
    other_names=("kimi_k2",),
    of_gguf=lambda file: gating(file) == SIGMOID,
    lora_targets=TARGETS,
    rules=Family(
        classes={
            "DeepseekV3Model": "model",
            "DeepseekV3DecoderLayer": "layer",
            "DeepseekV3Attention": "attention",
            "DeepseekV3MoE": "moe_block",
            "DeepseekV3Experts": "experts",
            "DeepseekV3TopkRouter": "router",
            "DeepseekV3MLP": "mlp",
            "DeepseekV3RMSNorm": "norm",
            "DeepseekV3RotaryEmbedding": "rope",
        },
        packages=("transformers.models.deepseek_v3.modeling_deepseek_v3", "ktransformers.models.modeling_deepseek_v3"),
        aliases={"MoEGate": "DeepseekV3TopkRouter", "DeepseekV3YarnRotaryEmbedding": "DeepseekV3RotaryEmbedding"},
        operators={
            f"{_KT}gate.KMoEGate": "router",
            f"{_KT}gate.KMoEGateDeepSeekV3": "router",
            f"{_KT}experts.KDeepseekV3MoE": "moe_block",
            f"{_KT}experts.KDeepseekV3MoEV2": "moe_block",
            f"{_KT}attention.KDeepseekV2Attention": "attention",
            f"{_KT}balance_serve_attention.flashinfer_attn": "attention",
            f"{_KT}layernorm.DeepseekV3RMSNormV2": "norm",
            f"{_KT}mlp.kDeepseekV3MLP": "mlp",
            f"{_KT}RoPE.YarnRotaryEmbeddingV3": "rope",
            f"{_KT}models.KDeepseekV2Model": "model",
        },
    ),
)
