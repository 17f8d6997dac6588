"""GLM-4.7-Flash: DeepSeek V3's layers in other sizes, known in GGUF by its size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM

from engine.architectures.parts.mla import Latent
from engine.architectures.registry import config_from_gguf, config_from_hf
from engine.errors import ModelFileError
from testing.harness import Harness
from testing.models.tiny import save_hf
from tests.architectures.test_deepseek import expect
from tests.engine.parity import BACKENDS, prompts

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 96,
    "qk_rope_head_dim": 32,
    "v_head_dim": 128,
    "max_position_embeddings": 512,
}


def test_absent_fields_are_transformers_defaults() -> None:
    config, theirs = config_from_hf({"model_type": "glm4_moe_lite"}), Glm4MoeLiteConfig()
    attention, experts = config.layers[1].attention, config.experts
    assert isinstance(attention, Latent) and experts is not None and experts.shared is not None
    assert (attention.heads, attention.q_rank, attention.nope_dim, attention.value_dim) == (20, 768, 192, 256)
    assert attention.norm_eps == 1e-6 and config.rms_norm_eps == theirs.rms_norm_eps == 1e-5
    assert (experts.experts, experts.top_k, experts.router.scale) == (64, 4, theirs.routed_scaling_factor)
    assert config.sparse_layers == list(range(1, 47)) and config.kv_bytes_per_token(2) == 47 * 1152
    assert config_from_hf(json.loads(json.dumps(theirs.to_dict()))).layers == config.layers


def test_layers_of_another_order_are_refused() -> None:
    kinds = ["sparse", "dense", *["sparse"] * 45]
    with pytest.raises(ModelFileError, match="mlp_layer_types is"):
        config_from_hf({"model_type": "glm4_moe_lite", "mlp_layer_types": kinds})


@pytest.mark.parametrize(("layers", "words", "name"), [(47, 154880, "glm4_moe_lite"), (47, 102400, "deepseek_v2")])
def test_gguf_is_known_by_its_size(layers: int, words: int, name: str) -> None:
    """Without a key of how routers score."""
    keys = {
        "block_count": layers,
        "context_length": 1024,
        "embedding_length": 2048,
        "feed_forward_length": 10240,
        "attention.head_count": 20,
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": 768,
        "attention.kv_lora_rank": 512,
        "attention.key_length": 576,
        "attention.value_length": 512,
        "attention.key_length_mla": 256,
        "attention.value_length_mla": 256,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 64,
        "rope.freq_base": 1e6,
        "leading_dense_block_count": 1,
        "expert_count": 64,
        "expert_used_count": 4,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 1536,
        "expert_weights_scale": 1.8,
    }
    metadata = {"general.architecture": "deepseek2"} | {f"deepseek2.{key}": value for key, value in keys.items()}
    tensors = {"token_embd.weight": (words, 2048), "blk.0.ffn_gate.weight": (10240, 2048)}
    config = config_from_gguf(metadata, tensors)
    assert config.architecture == name and config.experts is not None
    assert config.experts.router.score == ("sigmoid" if name == "glm4_moe_lite" else "softmax")


@BACKENDS
@pytest.mark.parametrize("q_rank", [64, None])
def test_logits_equal_transformers(tmp_path: Path, backend: dict, q_rank: int | None) -> None:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        model = Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**SIZES | {"q_lora_rank": q_rank})).eval()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("norm.weight"):
                tensor.normal_(1.0, 0.1)
            elif name.endswith("e_score_correction_bias"):
                tensor.normal_(0.0, 0.2)
            elif tensor.ndim > 1:
                tensor.normal_(0.0, 1.0 if "embed" in name else 1.5 / tensor.shape[-1] ** 0.5)
    save_hf(model, tmp_path)
    engine = Harness(tmp_path, max_num_batched_tokens=64, **backend)
    expect(engine, model, prompts(1, [3, 17, 110]))
    engine.close()
