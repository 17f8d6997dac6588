"""A ModelConfig of any shape, without a model."""

from __future__ import annotations

from typing import Any

from engine.architectures.config import ModelConfig


def config(**fields: Any) -> ModelConfig:
    base: dict[str, Any] = {
        "architecture": "qwen3_moe",
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "intermediate_size": 64,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "qk_norm": True,
        "tie_word_embeddings": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
        "bos_token_id": None,
        "eos_token_ids": (),
    }
    return ModelConfig(**{**base, **fields})
