"""Qwen2-MoE from its files to its tokens: configurations, whole-file checks, serving, adapters, `check`, the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2MoeConfig

from engine.architectures.registry import config_from_gguf, config_from_hf
from engine.config import EngineConfig
from engine.diagnostics.check import check_model
from engine.errors import AdapterError, ModelFileError
from engine.files.gguf.file import open_gguf
from engine.launch.backends import make_backends
from engine.lora.files.parse import parse_adapter
from engine.memory.items import Kind
from engine.planning.plan import plan_engine
from engine.weights.open import open_model
from rules import builtin_names
from testing.harness import Harness, greedy
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import save_hf, tiny_model
from tests.engine.family import Family
from tests.engine.parity import BACKENDS, CLEAR, prompts
from tests.lora import make

# As on the hub for Qwen1.5-MoE-A2.7B (transformers 4.39).
HUB: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
ROUNDED = 2e-2  # the same where a kernel rounds activations and weights to bf16: their logits differ by so much


def tiny(seed: int = 0, **config: Any) -> torch.nn.Module:
    return tiny_model(seed, family="qwen2_moe", **config)


# ---- configurations


def test_both_spellings_are_one_config() -> None:
    config = config_from_hf(HUB)
    attention, experts = config.layers[0].attention, config.experts
    assert (attention.bias, attention.output_bias, attention.qk_norm) == (True, False, "none")
    assert experts.router.normalise is None and experts.shared.gated
    assert (experts.shared.mlp.intermediate, attention.head_dim) == (5632, 128)
    assert config_from_hf(json.loads(json.dumps(Qwen2MoeConfig(**HUB).to_dict()))) == config


def test_absent_fields_are_transformers_defaults() -> None:
    config, theirs = config_from_hf({"model_type": "qwen2_moe"}), Qwen2MoeConfig()
    wanted = theirs.to_dict() | {"head_dim": 2048 // 16, "rope_theta": theirs.rope_parameters["rope_theta"]}
    wanted["num_experts"] = theirs.num_experts
    for name, value in config.numbers().items():
        assert value == wanted[name], name
    assert config.layers[0].attention.bias == theirs.qkv_bias
    assert (config.experts.router.normalise is not None) == theirs.norm_topk_prob


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        ({"shared_expert_intermediate_size": "wide"}, "shared_expert_intermediate_size"),
        ({"qkv_bias": 1}, "qkv_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "architectures"),
    ],
)
def test_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        config_from_hf(HUB | change)
    assert caught.value.field == field and field in str(caught.value)


@pytest.mark.parametrize(
    "case", [{}, {"qkv_bias": False}, {"num_hidden_layers": 3, "mlp_only_layers": [2]}, {"tie_word_embeddings": True}]
)
def test_gguf_metadata_gives_the_same_config(tmp_path: Path, case: dict[str, Any]) -> None:
    model = tiny(0, bos_token_id=2, **case)
    save_hf(model, tmp_path / "hf")
    save_gguf(model, tmp_path / "m.gguf", expert_type="F32", dense_type="F32")
    config = open_model(str(tmp_path / "hf")).config
    assert open_model(str(tmp_path / "m.gguf")).config == config
    assert open_model(str(tmp_path / "hf"), str(tmp_path / "m.gguf")).config == config


def test_llama_cpp_defaults(tmp_path: Path) -> None:
    """Older files give neither kind of expert's size."""
    save_gguf(tiny(0, intermediate_size=128), tmp_path / "m.gguf")
    file = open_gguf(tmp_path / "m.gguf")
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    sizes = ("expert_feed_forward_length", "expert_shared_feed_forward_length")
    bare = {k: v for k, v in file.metadata.items() if k.removeprefix("qwen2moe.") not in sizes}
    config = config_from_gguf(bare, shapes)
    assert (config.experts.intermediate, config.experts.shared.mlp.intermediate) == (64, 128)
    assert config.experts.router.normalise is None
    assert config_from_gguf(bare | {"qwen2moe.expert_weights_norm": True}, shapes).experts.router.normalise == 0.0
    assert config_from_gguf(bare | {"qwen2moe.expert_shared_count": 1}, shapes) == config
    with pytest.raises(ModelFileError, match=r"qwen2moe\.expert_shared_count is 2; allowed is 0 or 1"):
        config_from_gguf(bare | {"qwen2moe.expert_shared_count": 2}, shapes)


# ---- whole-file checks


@pytest.mark.parametrize(
    "name",
    ["self_attn.k_proj.bias", "mlp.shared_expert.up_proj.weight", "mlp.shared_expert_gate.weight", "mlp.gate.weight"],
)
@pytest.mark.parametrize("fault", ["missing", "shape"])
def test_tensors_that_are_missing_or_misshapen(tmp_path: Path, name: str, fault: str) -> None:
    save_hf(tiny(0), tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), f"model.layers.1.{name}"
    stored = tensors.pop(name)
    if fault == "shape":
        tensors[name] = torch.cat([stored, stored])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=rf"tensor {name} .*{'is missing' if fault == 'missing' else 'has shape'}"):
        open_model(str(tmp_path))


def test_tensors_of_another_family_are_refused(tmp_path: Path) -> None:
    """Nothing is left out: a norm of queries, a bias of the output."""
    save_hf(tiny(0), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("q_norm.weight", "o_proj.bias"):
        save_file(tensors | {f"model.layers.0.self_attn.{name}": torch.ones(16)}, tmp_path / "model.safetensors")
        with pytest.raises(ModelFileError, match=rf"does not account for: model\.layers\.0\.self_attn\.{name}"):
            open_model(str(tmp_path))


def test_a_gguf_of_another_family_beside_the_folder_is_refused(tmp_path: Path) -> None:
    save_hf(tiny(0), tmp_path / "hf")
    save_gguf(tiny_model(0), tmp_path / "m.gguf")
    with pytest.raises(ModelFileError, match=r"is a qwen3_moe model, .* describes qwen2_moe"):
        open_model(str(tmp_path / "hf"), str(tmp_path / "m.gguf"))


# ---- serving


@BACKENDS
@pytest.mark.parametrize("form", ["fused", "sharded", "gguf", "gguf with vectors"])
def test_every_form_on_disk_gives_the_same_tokens(tmp_path: Path, backend: dict[str, Any], form: str) -> None:
    model = held = tiny(5, num_hidden_layers=3, mlp_only_layers=[1])
    path = tmp_path / "model"
    if form.startswith("gguf"):
        path = tmp_path / "m.gguf"
        held = save_gguf(model, path, expert_type="Q8_0", dense_type="Q8_0", vectors="vectors" in form)
    else:
        save_hf(model, path, sharded=form == "sharded", fused=form == "fused")
    engine = Harness(path, **backend)
    asked = prompts(1, [5, 21])
    rounds = form.startswith("gguf") and backend.get("isa") == "amx"  # many rows of a quantised type, to bf16
    for prompt, tokens in zip(asked, engine.generate(asked), strict=True):
        expected, gap = greedy(held, prompt, 8, tokens)
        assert tokens == expected or gap < (ROUNDED if rounds else CLEAR)
    engine.close()


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Adapters on attention, routers, routed experts, the shared expert and its gate."""
    return Family(tmp_path_factory.mktemp("family"), family="qwen2_moe")


@BACKENDS
@pytest.mark.parametrize(
    "settings",
    [{}, {"cuda_graphs": "padded"}, {"expert_backend": "reference"}, {"max_num_batched_tokens": 16, "overlap": False}],
    ids=str,
)
def test_a_mixed_batch_equals_merged_models(family: Family, backend: dict[str, Any], settings: dict[str, Any]) -> None:
    names = [None, "adapter-0", "adapter-1", "adapter-2", None, "adapter-1"]
    asked = prompts(1, [3, 9, 20, 31, 14, 5])
    engine = family.engine(max_num_seqs=8, **backend, **settings)
    for name, prompt, tokens in zip(names, asked, engine.generate(asked, names), strict=True):
        family.expect(name, prompt, tokens)
    engine.close()


@pytest.mark.parametrize("part", ["shared_expert.gate_proj", "shared_expert.down_proj", "shared_expert_gate"])
def test_an_adapter_on_one_part_of_the_shared_expert_counts(family: Family, tmp_path: Path, part: str) -> None:
    config = make.config_of(family.base)
    weights = make.random_adapter(config, experts=False, scale=2.0)
    weights.linears = {name: pair for name, pair in weights.linears.items() if name.endswith(part)}
    make.write(tmp_path / "one", make.linear_keys(weights), make.lora_config())
    read = parse_adapter(tmp_path / "one", config, name="one")
    assert read.linears.keys() == weights.linears.keys() and len(read.linears) == 2
    engine = Harness(family.model_path, rules=None)
    engine.adapter("one", tmp_path / "one")
    prompt = prompts(4, [9])[0]
    base, changed = engine.generate([prompt] * 2, [None, "one"], max_tokens=16)
    engine.close()
    assert base != changed


def test_a_wrong_shape_on_the_shared_expert_is_refused(family: Family, tmp_path: Path) -> None:
    key = f"{make.PREFIX}model.layers.0.mlp.shared_expert.up_proj"
    tensors = {f"{key}.lora_A.weight": torch.zeros(3, 64), f"{key}.lora_B.weight": torch.zeros(95, 3)}
    with pytest.raises(AdapterError, match="in 64, out 96"):
        parse_adapter(make.write(tmp_path, tensors, make.lora_config()), make.config_of(family.base), name="x")


# ---- check and plan


def planned(path: Path, **config: Any) -> Any:
    settings = {"dtype": "bfloat16", "kv_cache_tokens": 128, "max_num_batched_tokens": 32, "max_num_seqs": 1}
    return plan_engine(EngineConfig(model=str(path), device="cpu", pack_cache="off", **(settings | config)))


@pytest.mark.parametrize("rules", ["reference", None])
@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
def test_check_agrees_with_a_sound_model(tmp_path: Path, rules: str | None, kind: str) -> None:
    save_gguf(tiny(1, mlp_only_layers=[1], num_hidden_layers=3), tmp_path / "m.gguf", kind, kind)
    plan = planned(tmp_path / "m.gguf", rules=rules)
    lines: list[str] = []
    assert check_model(plan.source, make_backends(plan), list(range(2, 34)), lines.append) is None
    assert all(line.startswith("ok") for line in lines)
    assert sum("mlp.shared_expert " in line for line in lines) == 2


def test_check_names_a_shared_expert_that_diverges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_hf(tiny(1), tmp_path)
    plan = planned(tmp_path, rules="reference")
    backends = make_backends(plan)
    linear = backends.linear("model.layers.1.mlp.shared_expert.up_proj")
    load = linear.load

    def wrong(name: str, weight: Any, bias: Any) -> Any:
        made = load(name, weight, bias)
        if name == "model.layers.1.mlp.shared_expert.up_proj":
            made.weight.mul_(1.5)
        return made

    monkeypatch.setattr(linear, "load", wrong)
    first = check_model(plan.source, backends, list(range(2, 34)), lambda _: None)
    assert first is not None and first.place == "model.layers.1.mlp.shared_expert"


def test_the_plan_counts_the_shared_expert(tmp_path: Path) -> None:
    sizes = []
    for shared in (64, 128):
        save_hf(tiny(0, shared_expert_intermediate_size=shared), tmp_path / str(shared))
        plan = planned(tmp_path / str(shared), rules="reference", dtype="float32")
        sizes += [item.num_bytes for item in plan.memory.items if item.kind is Kind.WEIGHTS]
        assert plan.placement.choices["model.layers.0.mlp.shared_expert.up_proj"].backend == "reference"
    assert sizes[1] - sizes[0] == 2 * 3 * 64 * 64 * 4  # layers, projections


@pytest.mark.parametrize("name", builtin_names())
def test_shipped_rules_place_every_module(name: str) -> None:
    from engine.architectures.qwen2_moe import QWEN2_MOE
    from rules import DEFAULT_CHOICE, load_rules, place

    modules = QWEN2_MOE.module_classes(make.config_of(tiny(0, num_hidden_layers=3, mlp_only_layers=[1])))
    choices = place(load_rules(name, QWEN2_MOE.rules), modules)
    assert DEFAULT_CHOICE not in choices.values()
    shared = {choices[f"model.layers.0.mlp.shared_expert.{part}_proj"].backend for part in ("gate", "up", "down")}
    assert shared == {choices["model.layers.0.self_attn.q_proj"].backend}
