"""Qwen3.5: served from the text's own folder, and from one with a vision tower, adapters included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from engine.architectures.registry import config_from_hf
from engine.errors import ModelFileError
from engine.weights.open import open_model
from testing.harness import Harness, greedy
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import save_hf, tiny_model
from tests.engine.parity import BACKENDS, CLEAR, prompts

TARGETS = [
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),  # of the shared expert
]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def as_published(name: str) -> str:
    """A name of the text model in a checkpoint with a vision tower."""
    return name.replace("model.layers", "model.language_model.layers").replace(
        "model.embed_tokens", "model.language_model.embed_tokens").replace(
        "model.norm", "model.language_model.norm")  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    model, folder = tiny_model(9, family="qwen3_5_moe_text"), tmp_path_factory.mktemp("base")
    save_hf(model, folder)
    return model, folder


@pytest.fixture(scope="module")
def published(base: tuple[torch.nn.Module, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a tower and layers that predict further tokens."""
    folder = tmp_path_factory.mktemp("published")
    tensors = {as_published(name): tensor for name, tensor in load_file(base[1] / "model.safetensors").items()}
    tensors |= {"model.visual.blocks.0.attn.qkv.weight": torch.zeros(4), "mtp.fc.weight": torch.zeros(4)}
    save_file(tensors, folder / "model.safetensors")
    text = json.loads((base[1] / "config.json").read_text())
    text.pop("architectures")
    text["rope_parameters"] |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    (folder / "config.json").write_text(json.dumps(config | {"text_config": text, "vision_config": {"depth": 27}}))
    return folder


@BACKENDS
@pytest.mark.parametrize("budget", [7, 256])
def test_tokens_and_adapters_are_those_of_transformers(base, published, tmp_path, backend, budget):
    model, folder = base
    text, whole = tmp_path / "text", tmp_path / "whole"
    adapted = get_peft_model(
        tiny_model(9, family="qwen3_5_moe_text"),
        LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, target_parameters=EXPERTS),
    ).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    adapted.save_pretrained(text)
    whole.mkdir()
    tensors = load_file(text / "adapter_model.safetensors")
    save_file({as_published(name): tensor for name, tensor in tensors.items()}, whole / "adapter_model.safetensors")
    (whole / "adapter_config.json").write_text((text / "adapter_config.json").read_text())
    asked = prompts(4, [3, 70, 20])
    for served, adapter in ((folder, text), (published, whole)):
        engine = Harness(served, max_num_batched_tokens=budget, max_num_seqs=4, **backend)
        engine.adapter("a", adapter)
        got = engine.generate(asked, [None, None, "a"], max_tokens=8)
        engine.close()
        for teacher, prompt, tokens in zip((model, model, adapted), asked, got, strict=True):
            expected, gap = greedy(teacher, prompt, 8, tokens)
            assert tokens == expected or gap < CLEAR


@pytest.fixture(scope="module")
def gguf(base: tuple[torch.nn.Module, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "m.gguf"
    save_gguf(base[0], file, "F32", "F32")
    return file


def test_the_configuration_of_the_whole_model_beside_a_gguf_file(base, published, gguf):
    """llama.cpp's file has the language model, whatever it was published with."""
    engine, asked = Harness(published, gguf=str(gguf)), prompts(4, [3, 40])
    got = engine.generate(asked, max_tokens=8)
    engine.close()
    for prompt, tokens in zip(asked, got, strict=True):
        expected, gap = greedy(base[0], prompt, 8, tokens)
        assert tokens == expected or gap < CLEAR


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    field=st.sampled_from([f"linear_{name}" for name in (
        "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"
    )] + ["layer_types"]),
    by=st.integers(1, 3),
)  # fmt: skip
def test_sizes_of_delta_nets_that_differ_from_those_of_a_gguf_file_are_refused(published, gguf, tmp_path, field, by):
    """Naming both; so is a layer of the other kind."""
    config = json.loads((published / "config.json").read_text())
    stored = config["text_config"][field]
    if field == "layer_types":
        layer = (by - 1) % 3
        given = ["linear_attention", "full_attention"][stored[layer] == "linear_attention"]
        problem = f"layer {layer} has {stored[layer]} in the GGUF file and {given} in the folder's config.json"
        config["text_config"][field][layer] = given
    else:
        # value heads are a multiple of key heads
        given = 1 if field == "linear_num_key_heads" else stored * (1 + by)
        problem = f"{field} is {stored} in the GGUF file and {given} in the folder's config.json"
        config["text_config"][field] = given
    (tmp_path / "config.json").write_text(json.dumps(config))
    if config["text_config"]["layer_types"] == ["linear_attention"] * 3:
        problem = "at least one is needed"
    with pytest.raises(ModelFileError, match=problem):
        open_model(str(tmp_path), str(gguf))


def test_what_is_left_out_is_named(published):
    lines = Harness(published).plan.lines
    assert "note: the vision tower is left out: 1 tensors are not read" in lines
    assert "note: multi-token prediction is left out: 1 tensors are not read" in lines


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"text_config": 3}, "text_config is 3; allowed is an object"),
        ({"text_config": {"layer_types": ["linear_attention"] * 40}}, "at least one is needed"),
        ({"text_config": {"layer_types": ["full_attention"]}}, "names 1 layers of 40"),
        ({"text_config": {"linear_num_value_heads": 24}}, "not a multiple of linear_num_key_heads 16"),
    ],
)
def test_what_cannot_be_read_is_refused(fields, said):
    with pytest.raises(ModelFileError, match=said):
        config_from_hf({"model_type": "qwen3_5_moe", **fields})
