"""Configurations: both spellings of transformers, GGUF metadata, and every refusal by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3MoeConfig

from engine.architectures.config import ModelConfig
from engine.architectures.parts.rotation import RopeScaling, Rotation
from engine.architectures.registry import config_from_gguf, config_from_hf
from engine.errors import ModelFileError
from engine.files.gguf.file import open_gguf
from engine.weights.open import open_model
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import save_hf, tiny_model

# As on the hub for Qwen3-30B-A3B (transformers 4.51).
OLD: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def new_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """The same as transformers 5 writes it."""
    return json.loads(json.dumps(Qwen3MoeConfig(**config).to_dict()))


def test_both_spellings_are_one_config() -> None:
    config = config_from_hf(OLD, {"eos_token_id": [151645, 151643], "bos_token_id": 151643})
    attention = config.layers[0].attention
    assert attention.rotation == Rotation(128, 1e6, 40960) and config.dtype == "bfloat16"
    assert config.eos_token_ids == (151645, 151643) and config.bos_token_id == 151643
    assert (config.num_experts, config.num_experts_per_tok, attention.head_dim) == (128, 8, 128)
    assert config.expert_params_per_token == 48 * 8 * 3 * 2048 * 768
    assert config.kv_bytes_per_token(2) == 98304
    new = new_spelling(OLD)
    assert "num_local_experts" in new and "rope_theta" not in new
    assert config_from_hf(new, {"eos_token_id": [151645, 151643]}) == config
    assert config_from_hf(OLD).eos_token_ids == (151645,)


def test_yarn_in_both_spellings() -> None:
    for scaling in (YARN, {"type" if k == "rope_type" else k: v for k, v in YARN.items()}):
        old = config_from_hf(OLD | {"rope_scaling": scaling})
        assert scaling_of(old) == RopeScaling("yarn", 4.0, original_max_position_embeddings=32768)
        assert config_from_hf(new_spelling(OLD | {"rope_scaling": scaling})) == old
        assert old.stretched_positions == 131072
    bare = config_from_hf(OLD | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}})
    assert scaling_of(bare) == RopeScaling("yarn", 2.0, 40960, extra={"truncate": False})
    linear = config_from_hf(OLD | {"rope_scaling": {"type": "linear", "factor": 2}})
    assert scaling_of(linear) == RopeScaling("linear", 2.0)


def test_absent_fields_are_transformers_defaults() -> None:
    config, theirs = config_from_hf({"model_type": "qwen3_moe"}), Qwen3MoeConfig()
    wanted = theirs.to_dict() | {"head_dim": 2048 // 32, "rope_theta": theirs.rope_parameters["rope_theta"]}
    wanted["num_experts"] = theirs.num_experts
    for name, value in config.numbers().items():
        assert value == wanted[name], name
    for name in ("max_position_embeddings", "tie_word_embeddings", "bos_token_id"):
        assert getattr(config, name) == getattr(theirs, name), name
    router, attention = config.experts.router, config.layers[0].attention
    assert (router.normalise is not None) == theirs.norm_topk_prob and attention.bias == theirs.attention_bias


@given(
    step=st.integers(1, 4),
    dense=st.lists(st.integers(0, 5), max_size=3),
    layers=st.integers(6, 9),
)
def test_sparse_layers_are_those_of_transformers(step: int, dense: list[int], layers: int) -> None:
    config = config_from_hf(OLD | {"decoder_sparse_step": step, "mlp_only_layers": dense, "num_hidden_layers": layers})
    wanted = [i for i in range(layers) if i not in dense and (i + 1) % step == 0]  # modeling_qwen3_moe's condition
    assert config.sparse_layers == wanted


def scaling_of(config: ModelConfig) -> RopeScaling | None:
    return config.layers[0].attention.rotation.scaling


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["OtherForCausalLM"], "model_type": "other"}, "architectures"),
    ({"architectures": ["Qwen3MoeForSequenceClassification"]}, "architectures"),
    ({"model_type": None}, "architectures"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window"),
    ({"layer_types": ["sliding_attention"] * 48}, "layer_types"),
    ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config"),
    ({"quantization_config": "fp8"}, "quantization_config"),
    ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "group_size"),
    ({"vocab_size": 0}, "vocab_size"),
    ({"vocab_size": "big"}, "vocab_size"),
    ({"hidden_size": 2048.0}, "hidden_size"),
    ({"hidden_size": True}, "hidden_size"),
    ({"num_hidden_layers": 1 << 40}, "num_hidden_layers"),
    ({"num_attention_heads": 30}, "num_attention_heads"),
    ({"num_key_value_heads": -4}, "num_key_value_heads"),
    ({"head_dim": 127}, "head_dim"),
    ({"head_dim": None, "hidden_size": 2000, "num_attention_heads": 24}, "head_dim"),
    ({"num_experts_per_tok": 129}, "num_experts_per_tok"),
    ({"num_experts": -1}, "num_experts"),
    ({"moe_intermediate_size": 0}, "moe_intermediate_size"),
    ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
    ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"rope_theta": -1}, "rope_theta"),
    ({"rope_theta": 10**400}, "rope_theta"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ({"num_hidden_layers": 10**400}, "num_hidden_layers"),
    ({"rope_scaling": [1]}, "rope_scaling"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "factor"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
    ({"rope_scaling": YARN | {"surprise": 1}}, "'surprise'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ({"mlp_only_layers": [48]}, "mlp_only_layers"),
    ({"mlp_only_layers": "all"}, "mlp_only_layers"),
    ({"eos_token_id": 151936}, "eos_token_id"),
    ({"eos_token_id": [1, None]}, "eos_token_id"),
    ({"bos_token_id": -1}, "bos_token_id"),
    ({"torch_dtype": "float8_e4m3fn"}, "dtype"),
    ({"max_position_embeddings": 0}, "max_position_embeddings"),
]


@pytest.mark.parametrize(("change", "field"), REFUSED, ids=[f"{i}-{name}" for i, (_, name) in enumerate(REFUSED)])
def test_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        config_from_hf(OLD | change)
    assert caught.value.field == field and field in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.just("x" * 5000) | st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from([*OLD, "rope_parameters", "layer_types", "num_local_experts", "dtype"]), JSON))
def test_any_value_is_taken_or_refused(change: dict[str, Any]) -> None:
    try:
        config = config_from_hf(OLD | change, {k: v for k, v in change.items() if k == "eos_token_id"})
    except ModelFileError as error:
        assert error.field is not None and len(str(error)) < 1000
    else:
        assert all(layer.attention.heads % layer.attention.kv_heads == 0 for layer in config.layers)


CASES: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True, "attention_bias": True},
    {"num_hidden_layers": 3, "mlp_only_layers": [2]},
    {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "attention_factor": 1.3,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
        }
    },
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
]


@pytest.mark.parametrize("case", CASES)
def test_gguf_metadata_gives_the_same_config(tmp_path: Path, case: dict[str, Any]) -> None:
    model = tiny_model(0, bos_token_id=2, **case)
    save_hf(model, tmp_path / "hf")
    save_gguf(model, tmp_path / "m.gguf", expert_type="F32", dense_type="F32")
    assert open_model(str(tmp_path / "m.gguf")).config == open_model(str(tmp_path / "hf")).config


def gguf_config(tmp_path: Path, metadata: dict[str, Any]) -> ModelConfig:
    save_gguf(tiny_model(0), tmp_path / "m.gguf", metadata=metadata)
    file = open_gguf(tmp_path / "m.gguf")
    return config_from_gguf(file.metadata, {name: t.shape for name, t in file.tensors.items()})


def test_chat_ends_are_found_in_the_vocabulary(tmp_path: Path) -> None:
    tokens = [f"t{i}" for i in range(128)]
    tokens[5], tokens[6], tokens[7] = "<|im_end|>", "<|endoftext|>", "<|im_start|>"
    kinds = [1] * 128
    kinds[5] = kinds[6] = kinds[7] = 3
    vocabulary = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    assert gguf_config(tmp_path, vocabulary).eos_token_ids == (1, 5, 6)
    assert gguf_config(tmp_path, vocabulary | {"tokenizer.ggml.eot_token_id": 9}).eos_token_ids == (1, 9, 5, 6)


def normalises(config: ModelConfig) -> bool:
    return config.experts.router.normalise is not None


def test_llama_cpp_defaults(tmp_path: Path) -> None:
    assert normalises(gguf_config(tmp_path, {}))
    assert not normalises(gguf_config(tmp_path, {"qwen3moe.expert_weights_norm": False}))
    old = {"qwen3moe.rope.scale_linear": 4.0}
    assert scaling_of(gguf_config(tmp_path, old)) == RopeScaling("linear", 4.0)
    assert scaling_of(gguf_config(tmp_path, {"qwen3moe.rope.scaling.type": "none"} | old)) is None
    assert gguf_config(tmp_path, {"qwen3moe.attention.head_count": [4, 4]}).layers[0].attention.heads == 4


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"qwen3moe.attention.head_count": "4"}, "attention.head_count is '4'"),
        ({"qwen3moe.attention.head_count": [4, 8]}, "differing values"),
        ({"qwen3moe.attention.sliding_window": 128}, "sliding_window is 128"),
        ({"qwen3moe.expert_gating_func": 2}, "expert_gating_func is 2"),
        ({"qwen3moe.expert_weights_scale": 2.5}, "expert_weights_scale is 2.5"),
        ({"qwen3moe.expert_shared_count": 1}, "expert_shared_count is 1"),
        ({"qwen3moe.expert_shared_feed_forward_length": 64}, "has no shared expert"),
        ({"qwen3moe.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
        ({"qwen3moe.rope.dimension_count": 16}, "rope.dimension_count is 16"),
        ({"qwen3moe.attention.value_length": 64}, "attention.value_length is 64"),
        ({"qwen3moe.block_count": 0}, "block_count is 0"),
        ({"qwen3moe.attention.layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon is 0.0"),
        ({"tokenizer.ggml.eos_token_id": 128}, "eos_token_id is 128"),
    ],
)
def test_gguf_metadata_refused_by_name(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        gguf_config(tmp_path, metadata)
    assert message in str(caught.value)


SCALAR = st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.just("x" * 5000)


@given(data=st.data())
def test_any_gguf_metadata_is_taken_or_refused(data: st.DataObject) -> None:
    good: dict[str, Any] = {
        "general.architecture": "qwen3moe",
        "qwen3moe.block_count": 2,
        "qwen3moe.context_length": 512,
        "qwen3moe.embedding_length": 64,
        "qwen3moe.feed_forward_length": 96,
        "qwen3moe.attention.head_count": 4,
        "qwen3moe.attention.head_count_kv": 2,
        "qwen3moe.attention.key_length": 32,
        "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen3moe.expert_count": 8,
        "qwen3moe.expert_used_count": 2,
        "qwen3moe.expert_feed_forward_length": 64,
    }
    rope = [f"qwen3moe.rope.scaling.{n}" for n in ("type", "factor", "original_context_length", "attn_factor")]
    keys = [*good, *rope, "qwen3moe.rope.freq_base", "qwen3moe.rope.scale_linear", "tokenizer.ggml.eos_token_id"]
    shapes = {"token_embd.weight": (128, 64), "output.weight": (128, 64)}
    assert config_from_gguf(good, shapes).num_experts == 8
    changed = good | data.draw(st.dictionaries(st.sampled_from(keys), SCALAR, max_size=3))
    try:
        config = config_from_gguf(changed, shapes)
    except ModelFileError as error:
        assert error.field is not None and len(str(error)) < 1000
    else:
        assert config.layers[0].attention.head_dim % 2 == 0 and config.num_experts_per_tok <= config.num_experts
