"""DeepSeek V2 and V2-Lite. Defaults are those of transformers' DeepseekV2Config."""

from __future__ import annotations

from typing import Any

from engine.architectures.base import Architecture
from engine.architectures.config import ModelConfig
from engine.architectures.fields import Fields
from engine.architectures.gguf import GGUFModel
from engine.architectures.hf import Defaults, config_of_hf
from engine.architectures.latent import (
    SOFTMAX,
    TARGETS,
    checked_router,
    common_fields,
    gating,
    latent_config_of_gguf,
    latent_fields,
    latent_layers,
    latent_sizes,
)
from engine.architectures.parts.mlp import Router
from engine.errors import shown
from rules import Family

_NAME = "deepseek_v2"
_DEFAULTS = Defaults(
    vocab_size=102400,
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    intermediate_size=11008,
    num_experts=64,
    num_experts_per_tok=6,
    moe_intermediate_size=1407,
    max_position_embeddings=2048,
)
_KT = "ktransformers.operators."


def _read_hf(fields: Fields, generation: Fields) -> ModelConfig:
    """Softmax over all experts. Weights are never normalised in transformers, and in DeepSeek's own code where
    norm_topk_prob is true."""
    if fields.boolean("norm_topk_prob", False):
        raise fields.error("norm_topk_prob", "is true; implementations differ in it, only false can be served")
    if fields.boolean("mlp_bias", False):
        raise fields.error("mlp_bias", "is true; MLPs with biases cannot be served")
    if (score := fields.text("scoring_func", "softmax")) != "softmax":
        raise fields.error("scoring_func", f"is {shown(score)}; DeepSeek V2 has softmax")
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error("topk_method", f"is {shown(method)}; allowed are greedy and group_limited_greedy")
    grouped = method == "group_limited_greedy"
    router = Router(
        normalise=None,
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=fields.integer("n_group", 1) if grouped else 1,
        top_groups=fields.integer("topk_group", 1) if grouped else 1,
    )
    sizes, router = latent_sizes(fields, shared=2, interleaved=True), checked_router(fields, router, _DEFAULTS)
    return config_of_hf(
        common_fields(fields, _DEFAULTS, dense=0), generation, _DEFAULTS,
        architecture=_NAME, layers=lambda n: latent_layers(n, sizes, router),
    )  # fmt: skip


def _read_gguf(file: GGUFModel) -> ModelConfig:
    if file.fields.boolean("expert_weights_norm", False):
        raise file.fields.error("expert_weights_norm", "is true; weights of DeepSeek V2 are not normalised")
    return latent_config_of_gguf(file, _NAME, lambda file: Router(normalise=None))


def _own_fields(config: ModelConfig) -> dict[str, Any]:
    grouped = config.experts is not None and config.experts.router.groups > 1
    return latent_fields(config) | {"topk_method": "group_limited_greedy" if grouped else "greedy"}


DEEPSEEK_V2 = Architecture(
    name=_NAME,
    model_class="DeepseekV2ForCausalLM",
    gguf="deepseek2",
    read_hf=_read_hf,
    read_gguf=_read_gguf,
    own_fields=_own_fields,
    of_gguf=lambda file: gating(file) == SOFTMAX,
    lora_targets=TARGETS,
    rules=Family(
        classes={
            "DeepseekV2Model": "model",
            "DeepseekV2DecoderLayer": "layer",
            "DeepseekV2Attention": "attention",
            "DeepseekV2Moe": "moe_block",
            "DeepseekV2Experts": "experts",
            "DeepseekV2TopkRouter": "router",
            "DeepseekV2MLP": "mlp",
            "DeepseekV2RMSNorm": "norm",
            "DeepseekV2RotaryEmbedding": "rope",
        },
        packages=("transformers.models.deepseek_v2.modeling_deepseek_v2", "ktransformers.models.modeling_deepseek"),
        aliases={
            "MoEGate": "DeepseekV2TopkRouter",
            "DeepseekV2MoE": "DeepseekV2Moe",
            "DeepseekV2YarnRotaryEmbedding": "DeepseekV2RotaryEmbedding",
        },
        operators={
            f"{_KT}gate.KMoEGate": "router",
            f"{_KT}experts.KDeepseekV2MoE": "moe_block",
            f"{_KT}attention.KDeepseekV2Attention": "attention",
            f"{_KT}RoPE.YarnRotaryEmbedding": "rope",
            f"{_KT}models.KDeepseekV2Model": "model",
        },
    ),
)
