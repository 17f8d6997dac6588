"""What a machine with a GPU would be given, judged without one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.errors import RulesError, UserError
from engine.memory_gpu import gpu_items, hot_expert_bytes, slot_table_bytes, streaming_item
from engine.memory_limits import Memory
from engine.model_config import ModelConfig
from engine.placement import choose
from engine.weights.open import open_model
from rules import Machine
from tests.tiny import save_hf, tiny_model

GPU = Machine(gpu=True, native=True, flashinfer=True, gpu_count=1, reasons={"native": "", "flashinfer": "not there"})


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return ModelConfig.from_hf(tiny_model(head_dim=64, num_hidden_layers=3, mlp_only_layers=[1]).config.to_dict())


def test_default_is_the_gpu_with_experts_on_the_cpu(model):
    placement = choose(EngineConfig(), model, GPU)
    assert placement.device == "cuda" and not placement.moved
    assert placement.used(".mlp.experts") == ["native"]
    assert placement.used(".self_attn") == ["flashinfer"] and placement.used("_proj") == ["gpu"]


def test_what_flashinfer_cannot_compute_is_said(model):
    for config, odd in ((EngineConfig(dtype="float32"), model), (EngineConfig(), replace(model, head_dim=48))):
        placement = choose(config, odd, GPU)
        assert placement.device == "cuda" and placement.used(".self_attn") == ["reference"]
        assert any("attentions run in torch" in line and "flashinfer" in line for line in placement.lines)


def test_a_gpu_without_flashinfer_is_not_used_and_that_is_said(model):
    machine = replace(GPU, flashinfer=False)
    placement = choose(EngineConfig(), model, machine)
    assert placement.device == "cpu" and any("the GPU is not used: not there" in line for line in placement.lines)
    with pytest.raises(UserError, match="not there"):
        choose(EngineConfig(device="cuda"), model, machine)


def test_reference_rules_compute_on_the_gpu(model):
    placement = choose(EngineConfig(rules="reference"), model, replace(GPU, flashinfer=False))
    assert placement.device == "cuda" and placement.used(".mlp.experts") == ["reference"]
    assert placement.choices["model.layers.0.mlp.experts"].device == "cuda"


def test_one_device_for_all_but_experts(model):
    with pytest.raises(RulesError, match="one device"):
        choose(EngineConfig(attention_backend="native"), model, GPU).device  # noqa: B018
    placement = choose(EngineConfig(expert_backend="gpu"), model, GPU)
    assert placement.device == "cuda" and placement.choices["model.layers.0.mlp.experts"].device == "cuda"


def test_an_embedding_on_the_cpu_is_noted(model, tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "- match: {name: '^model.embed_tokens'}\n"
        "  replace: {class: default, kwargs: {generate_device: cpu, prefill_device: cpu}}\n"
        "- match: {name: '\\.mlp\\.experts$'}\n"
        "  replace: {class: ktserve.experts.native}\n"
        "  recursive: false\n"
        "- match: {name: '\\.self_attn$'}\n"
        "  replace: {class: ktserve.attention.flashinfer}\n"
        "- match: {class: torch.nn.Linear}\n"
        "  replace: {class: ktserve.linear.gpu}\n"
        "- match: {class: torch.nn.Module}\n"
        "  replace: {class: ktserve.torch, kwargs: {device: cuda}}\n"
    )
    placement = choose(EngineConfig(rules=str(rules)), model, GPU)
    assert placement.device == "cuda" and placement.moved == ["model.embed_tokens"]
    assert any("model.embed_tokens on cuda" in line for line in placement.lines)


def test_memory_of_a_gpu(model):
    config = EngineConfig(max_num_seqs=16, max_adapter_slots=2, max_adapter_rank=20)
    items = gpu_items(config, model, 2)
    assert {item.device for item in items} == {"GPU 0"}
    assert any(item.label == "CUDA graphs, 2 x 5 sizes" for item in items)
    rank, hidden, q, kv = 32, 64, 256, 128
    attention = (3 * hidden + q + 2 * kv) + (q + hidden)
    narrow = 3 * attention + 3 * (hidden + 96)
    assert slot_table_bytes(config, model, 2) == 3 * rank * (narrow * 2 + 2 * (hidden + 8) * 4)
    fewer = gpu_items(EngineConfig(max_num_seqs=16, max_adapter_slots=0, cuda_graphs="off"), model, 2)
    assert [item.label for item in fewer] == ["attention workspace"]


def test_prefill_is_streamed_where_the_rules_say(model):
    assert choose(EngineConfig(), model, GPU).streams_prefill
    assert choose(EngineConfig(), model, GPU).expert_option("prefill_threshold", 0) == "auto"
    assert not choose(EngineConfig(expert_backend="gpu"), model, GPU).streams_prefill
    kt = choose(EngineConfig(expert_backend="kt"), model, replace(GPU, kt=True))
    assert not kt.streams_prefill and any("not streamed" in line for line in kt.lines)


def test_layers_that_share_experts_share_their_options(model, tmp_path):
    rules = tmp_path / "rules.yaml"
    body = "".join(
        f"- match: {{name: '{name}'}}\n"
        "  replace: {class: ktserve.experts.native, kwargs: {prefill_device: cuda, prefill_threshold: "
        f"{limit}}}}}\n  recursive: false\n"
        for name, limit in (("layers.0.mlp.experts$", 100), ("\\.mlp\\.experts$", 200))
    )
    rules.write_text(
        body + "- match: {class: torch.nn.Module}\n  replace: {class: ktserve.torch, kwargs: {device: cuda}}\n"
    )
    with pytest.raises(RulesError, match="several values of prefill_threshold"):
        choose(EngineConfig(rules=str(rules)), model, GPU).expert_option("prefill_threshold", 0)


def test_memory_for_hot_experts(model, tmp_path):
    save_hf(tiny_model(head_dim=64, num_hidden_layers=3, mlp_only_layers=[1]), tmp_path)
    source = open_model(str(tmp_path), None)
    every = 2 * 8 * 3 * 64 * 64 * 2
    assert hot_expert_bytes(EngineConfig(), source, Memory("GPU 0", 1 << 40, 1 << 40), []) == every
    few = hot_expert_bytes(
        EngineConfig(), source, Memory("GPU 0", 1 << 20, 1 << 40), [streaming_item(model, 2, "cuda")]
    )
    assert 0 < few < every
    assert hot_expert_bytes(EngineConfig(gpu_expert_memory="3KiB"), source, Memory("GPU 0", 0, 0), []) == 3072
