"""Tiny random models, for every test that needs one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

_SHARED = {"shared_expert_intermediate_size": 96, "norm_topk_prob": False}
_LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}
FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {"head_dim": 32}),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM, _SHARED),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {}),
    "glm4_moe": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        {"head_dim": 32, "use_qk_norm": True, "routed_scaling_factor": 2.5},
    ),
    "minimax_m2": (MiniMaxM2Config, MiniMaxM2ForCausalLM, {"head_dim": 32, "rotary_dim": 16}),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM, _LATENT | {"routed_scaling_factor": 1.5}),
    "deepseek_v3": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        _LATENT | {"n_group": 4, "topk_group": 2, "rope_interleave": True, "num_nextn_predict_layers": 0},
    ),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM, {"head_dim": 32, "sliding_window": 16}),
}
_DELTA = {
    "head_dim": 32,
    "shared_expert_intermediate_size": 96,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
# whose layers keep states: they have tests of their own, beside those of every family
STATEFUL: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, _DELTA),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, _DELTA),
}
# layers of another family's in other sizes: served in a test of its own
ALIKE: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM, _LATENT | {"num_nextn_predict_layers": 0}),
}
TRAINED = (*FAMILIES, *STATEFUL)
WIDE_EXPERTS = ("mixtral", "minimax_m2", "gpt_oss")  # as wide as `intermediate_size`, in all layers, and normalised


def tiny_model(
    seed: int = 0, dtype: torch.dtype = torch.float32, family: str = "qwen3_moe", **config: Any
) -> PreTrainedModel:
    """A random model in eval mode whose logits differ clearly between tokens. `config` overrides fields of the family's
    configuration; K-quants need hidden_size and moe_intermediate_size to be multiples of 256, Q8_0 of 32."""
    make_config, make_model, own = (FAMILIES | STATEFUL | ALIKE)[family]
    fields: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 1,
        "rope_theta": 10000.0,
    }
    fields |= own | config
    if family in WIDE_EXPERTS:
        fields["intermediate_size"] = fields.pop("moe_intermediate_size")
        fields = {name: value for name, value in fields.items() if name not in ("norm_topk_prob", "mlp_only_layers")}
    if family == "glm4_moe":  # as many dense layers, but the first
        fields["n_routed_experts"] = fields.pop("num_experts")
        fields.setdefault("first_k_dense_replace", len(fields.pop("mlp_only_layers", ())))
        fields.setdefault("num_nextn_predict_layers", 0)
    if family.startswith("deepseek") or family in ALIKE:  # keys and values of as many heads as queries
        fields["n_routed_experts"] = fields.pop("num_experts")
        fields.pop("mlp_only_layers", None)
        fields.pop("head_dim", None)  # of the rotated part there
        fields["num_key_value_heads"] = fields["num_attention_heads"]
        fields["norm_topk_prob"] = family != "deepseek_v2" and fields["norm_topk_prob"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = make_config(**fields)
        if "rotary_dim" in fields:  # until 5.18 transformers did not read it
            made.rope_parameters.setdefault("partial_rotary_factor", fields["rotary_dim"] / fields["head_dim"])
        model = make_model(made)
        for name in fields.keys() & {"swiglu_limit", "swiglu_alpha"}:  # likewise
            for module in model.modules():
                if hasattr(module, name.removeprefix("swiglu_")):
                    setattr(module, name.removeprefix("swiglu_"), fields[name])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    minus_one = family in STATEFUL and not name.endswith("linear_attn.norm.weight")
                    parameter.normal_(0.0 if minus_one else 1.0, 0.1)
                elif name.endswith("A_log"):
                    parameter.uniform_(-3.0, 1.0)
                elif name.endswith(("dt_bias", "conv1d.weight")):
                    parameter.normal_(0.0, 0.5)
                elif name.endswith(("bias", ".sinks")):
                    parameter.normal_(0.0, 0.1)
                elif "embed_tokens" in name and not model.config.tie_word_embeddings:
                    parameter.normal_(0.0, 1.0)
                else:
                    stacked = family == "gpt_oss" and ".experts." in name  # inputs before outputs
                    parameter.normal_(0.0, 1.5 / math.sqrt(parameter.shape[1 if stacked else -1]))
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0.0, 0.2)
    return model.to(dtype).eval()


def save_hf(model: PreTrainedModel, folder: Path, sharded: bool = False, fused: bool = False) -> None:
    """config.json, generation_config.json and safetensors: one file or several with an index, experts one by one
    (as on the hub) or stacked (as in transformers' memory)."""
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, save_original_format=not fused, max_shard_size=size // 3 if sharded else size * 2)


def stored_parameters(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters, and the buffers that are stored."""
    biases = {name: held for name, held in model.named_buffers() if name.endswith("e_score_correction_bias")}
    return dict(model.named_parameters()) | biases
