"""GLM-4.x and MiniMax-M2: their files in every form, served, with adapters, equal to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, MiniMaxM2Config

from engine.architectures.registry import config_from_gguf, config_from_hf
from engine.config import EngineConfig
from engine.diagnostics.check import check_model
from engine.errors import ModelFileError
from engine.files.gguf.file import open_gguf
from engine.launch.backends import make_backends
from engine.memory.items import Kind
from engine.planning.plan import plan_engine
from engine.weights.open import open_model
from testing.harness import Harness, full_logits, greedy
from testing.models.gguf_writer import save_gguf
from testing.models.quantised import FP8_CONFIG, float_quantised_config, save_quantised
from testing.models.tiny import save_hf, tiny_model
from tests.engine.parity import CLEAR, prompts
from tests.engine.test_lora_serving import Family

# GLM-4.6's config.json
GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "pad_token_id": 151329,
    "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
    "partial_rotary_factor": 0.5, "initializer_range": 0.02, "intermediate_size": 12288,
    "max_position_embeddings": 202752, "model_type": "glm4_moe", "moe_intermediate_size": 1536,
    "norm_topk_prob": True, "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 160,
    "n_shared_experts": 1, "routed_scaling_factor": 2.5, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "num_hidden_layers": 92, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0", "use_cache": True, "use_qk_norm": True, "vocab_size": 151552,
}  # fmt: skip
# MiniMax-M2's, without what belongs to its own modelling code
MINIMAX: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62, "bos_token_id": None, "eos_token_id": None,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536,
    "max_position_embeddings": 196608, "model_type": "minimax_m2", "mtp_transformer_layers": 1,
    "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8,
    "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06,
    "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid", "shared_intermediate_size": 0,
    "tie_word_embeddings": False, "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
}  # fmt: skip
NAMES = ("glm4_moe", "minimax_m2")
each = pytest.mark.parametrize("name", NAMES)
BACKENDS: dict[str, dict[str, Any]] = {"torch": {}, "native": {"rules": None}}
on_backends = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)


def tiny(name: str, seed: int = 0, **config: Any) -> torch.nn.Module:
    return tiny_model(seed, family=name, **config)


# ---- configurations


def test_glm_in_both_spellings() -> None:
    config = config_from_hf(GLM)
    attention, experts = config.layers[0].attention, config.experts
    assert (attention.bias, attention.output_bias, attention.qk_norm) == (True, False, "head")
    assert (attention.rotation.dim, attention.head_dim, config.sparse_layers[0]) == (64, 128, 3)
    router = experts.router
    assert (router.score, router.bias, router.scale, router.normalise) == ("sigmoid", True, 2.5, 1e-20)
    assert (experts.experts, experts.top_k, experts.intermediate, experts.shared.gated) == (160, 8, 1536, False)
    assert [part.prefix for part in config.left_out] == ["model.layers.92."]
    assert config_from_hf(json.loads(json.dumps(Glm4MoeConfig(**GLM).to_dict()))) == config


def test_minimax_in_both_spellings() -> None:
    config = config_from_hf(MINIMAX)
    attention, experts = config.layers[0].attention, config.experts
    assert (attention.qk_norm, attention.rotation.dim, attention.rotation.theta) == ("whole", 64, 5e6)
    assert (experts.router.score, experts.router.normalise, experts.router.scale) == ("sigmoid", 0.0, 1.0)
    assert (experts.experts, experts.intermediate, experts.shared) == (256, 1536, None)
    assert config.quantisation.rows == config.quantisation.group == 128 and config.sparse_layers == list(range(62))
    assert config_from_hf(json.loads(json.dumps(MiniMaxM2Config(**MINIMAX).to_dict()))) == config


@pytest.mark.parametrize(("name", "theirs"), [("glm4_moe", Glm4MoeConfig()), ("minimax_m2", MiniMaxM2Config())])
def test_absent_fields_are_transformers_defaults(name: str, theirs: Any) -> None:
    head = {"head_dim": 128} if name == "glm4_moe" else {}  # without it theirs is 42, of which 21 would be rotated
    config = config_from_hf({"model_type": name, **head})
    wanted = theirs.to_dict() | {"rope_theta": theirs.rope_parameters["rope_theta"], "num_experts": 128}
    if name == "glm4_moe":
        wanted |= {**head, "rotary_dim": 64, "shared_expert_intermediate_size": 1408}
    else:
        wanted |= {"num_experts": theirs.num_local_experts, "moe_intermediate_size": theirs.intermediate_size}
    for field, value in config.numbers().items():
        assert value == wanted[field], field
    assert config.max_position_embeddings == theirs.max_position_embeddings


@pytest.mark.parametrize(
    ("base", "change", "said"),
    [
        (GLM, {"n_group": 3}, "n_group is 3, not a divisor of 160"),
        (GLM, {"n_group": 40, "topk_group": 1}, "num_experts_per_tok is 8; the 1 groups of topk_group hold 4 experts"),
        (GLM, {"n_group": 2, "topk_group": 3}, "topk_group is 3; allowed is 1 to n_group 2"),
        (GLM, {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        (GLM, {"partial_rotary_factor": 0.01}, "partial_rotary_factor is 0.01: 1 of 128 values"),
        (GLM, {"routed_scaling_factor": 0}, "routed_scaling_factor is 0"),
        (GLM, {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        (MINIMAX, {"attn_type_list": [1, 0]}, "attn_type_list holds a kind other than 1"),
        (MINIMAX, {"qk_norm_type": "per_head"}, "qk_norm_type"),
        (MINIMAX, {"scoring_func": "softmax"}, "scoring_func"),
        (MINIMAX, {"shared_intermediate_size": 64}, "shared_intermediate_size is set"),
        (MINIMAX, {"rotary_dim": 130}, "partial_rotary_factor is 1.015625"),
        ({"model_type": "qwen3_moe"}, {"partial_rotary_factor": 0.5}, "only 1 can be served"),
    ],
)
def test_refused_by_name(base: dict[str, Any], change: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelFileError, match=said):
        config_from_hf(base | change)


@pytest.mark.parametrize(
    "case",
    [
        {"name": "glm4_moe", "use_qk_norm": False, "attention_bias": True, "n_shared_experts": 2},
        {"name": "glm4_moe", "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "mlp_only_layers": [0]},
        {"name": "glm4_moe", "partial_rotary_factor": 1.0, "tie_word_embeddings": True},
        {"name": "minimax_m2", "rope_theta": 5e6},
        {"name": "minimax_m2", "rotary_dim": 32},
    ],
)
def test_gguf_metadata_gives_the_same_config(tmp_path: Path, case: dict[str, Any]) -> None:
    model = tiny(**case, bos_token_id=2)
    save_hf(model, tmp_path / "hf")
    save_gguf(model, tmp_path / "m.gguf", expert_type="F32", dense_type="F32")
    config = open_model(str(tmp_path / "hf")).config
    assert open_model(str(tmp_path / "m.gguf")).config == config
    assert open_model(str(tmp_path / "hf"), str(tmp_path / "m.gguf")).config == config


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("glm4_moe", "glm4moe.expert_gating_func", 1, "expert_gating_func is 1; allowed is 2"),
        ("glm4_moe", "glm4moe.leading_dense_block_count", 1, "is 1, and 0 layers have tensors of a dense MLP"),
        ("glm4_moe", "glm4moe.rope.dimension_count", 34, "dimension_count is 34"),
        ("glm4_moe", "glm4moe.nextn_predict_layers", 2, "nextn_predict_layers is 2 of 2 layers"),
        ("glm4_moe", "glm4moe.expert_group_count", 3, "n_group is 3"),
        ("minimax_m2", "minimax-m2.expert_weights_scale", 2.0, "expert_weights_scale"),
        ("minimax_m2", "minimax-m2.expert_shared_count", 1, "expert_shared_count is 1; allowed is 0"),
    ],
)
def test_metadata_is_refused_by_name(tmp_path: Path, name: str, key: str, value: Any, said: str) -> None:
    save_gguf(tiny(name), tmp_path / "m.gguf")
    file = open_gguf(tmp_path / "m.gguf")
    shapes = {stored: tensor.shape for stored, tensor in file.tensors.items()}
    with pytest.raises(ModelFileError, match=said):
        config_from_gguf({**file.metadata, key: value}, shapes)


# ---- what is left out


def planned(path: Path, **config: Any) -> Any:
    settings = {"dtype": "bfloat16", "kv_cache_tokens": 128, "max_num_batched_tokens": 32, "max_num_seqs": 1}
    return plan_engine(EngineConfig(model=str(path), device="cpu", pack_cache="off", **(settings | config)))


def test_layers_that_predict_further_tokens_are_left_out_and_named(tmp_path: Path) -> None:
    model = tiny("glm4_moe", num_nextn_predict_layers=1)
    save_hf(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    extra = {f"model.layers.2.{n}": torch.ones(8) for n in ("eh_proj.weight", "enorm.weight", "mlp.gate.weight")}
    save_file(stored | extra, tmp_path / "model.safetensors")
    source = open_model(str(tmp_path))
    assert source.config.num_hidden_layers == 2 and not any("layers.2." in name for name in source.names())
    assert "note: layer 2 (multi-token prediction) is left out: 3 tensors are not read" in planned(tmp_path).lines
    save_file(stored | {"model.layers.3.enorm.weight": torch.ones(8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"does not account for: model\.layers\.3\.enorm"):
        open_model(str(tmp_path))


def test_such_a_layer_of_gguf(tmp_path: Path) -> None:
    model = tiny("glm4_moe", num_nextn_predict_layers=1)
    save_gguf(model, tmp_path / "plain.gguf")
    file, writer = gguf.GGUFReader(tmp_path / "plain.gguf"), gguf.GGUFWriter(tmp_path / "m.gguf", "glm4moe")
    for field in file.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in file.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name in ("nextn.eh_proj.weight", "nextn.enorm.weight", "attn_norm.weight"):
        writer.add_tensor(f"blk.2.{name}", torch.ones(8).numpy())
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    source = open_model(str(tmp_path / "m.gguf"))
    assert source.config.num_hidden_layers == 2
    assert list(source.left_out) == ["layer 2 (multi-token prediction) is left out: 3 tensors are not read"]
    engine, prompt = Harness(tmp_path / "m.gguf"), prompts(0, [9])[0]
    held = save_gguf(model, tmp_path / "again.gguf")
    assert engine.generate([prompt]) == [greedy(held, prompt, 8)[0]]
    engine.close()


@each
def test_a_vision_tower_is_left_out_and_named(tmp_path: Path, name: str) -> None:
    save_hf(tiny(name), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    vision = {f"{prefix}.blocks.0.weight": torch.ones(2) for prefix in ("model.visual", "vision_tower")}
    save_file(stored | vision, tmp_path / "model.safetensors")
    assert list(open_model(str(tmp_path)).left_out) == ["the vision tower is left out: 2 tensors are not read"]


# ---- served


def saved(model: torch.nn.Module, path: Path, form: str) -> tuple[Path, torch.nn.Module]:
    """Where it lies, and the float32 model that the files hold."""
    if form.startswith("gguf"):
        kind = form.removeprefix("gguf ")
        return path / "m.gguf", save_gguf(model, path / "m.gguf", expert_type=kind, dense_type=kind)
    if form == "fp8":  # as the vendor of each quantises
        config = float_quantised_config("channel") if model.config.model_type == "glm4_moe" else FP8_CONFIG
        return path, save_quantised(model, path, config)[0]
    save_hf(model, path, sharded=form == "sharded", fused=form == "fused")
    return path, model


@each
@on_backends
@pytest.mark.parametrize("form", ["per expert", "sharded", "fused", "fp8", "gguf F32", "gguf Q8_0"])
def test_every_form_on_disk_gives_the_same_tokens(
    tmp_path: Path, backend: dict[str, Any], form: str, name: str
) -> None:
    """A prompt, and again behind the cached one."""
    if form == "gguf Q8_0" and backend:
        backend = backend | {"linear_backend": "reference", "expert_backend": "reference"}  # kernels round activations
    model = tiny(name, 4, num_hidden_layers=3, mlp_only_layers=[0], hidden_size=128, moe_intermediate_size=128,
                 intermediate_size=128)  # fmt: skip
    path, held = saved(model, tmp_path, form)
    engine = Harness(path, max_num_batched_tokens=32, **backend)
    asked = prompts(4, [5, 40, 33])
    answers = [engine.generate(asked, max_tokens=6) for _ in range(2)]
    assert engine.core.scheduler.stats()["prefix_hit_tokens"] > 0
    engine.close()
    for got in answers:
        for prompt, tokens in zip(asked, got, strict=True):
            expected, gap = greedy(held, prompt, 6, tokens)
            assert tokens == expected or gap < CLEAR


@each
@on_backends
def test_logits_equal_transformers(tmp_path: Path, backend: dict[str, Any], name: str) -> None:
    model = tiny(name, 6, num_hidden_layers=3, mlp_only_layers=[0])
    save_hf(model, tmp_path)
    engine, prompt = Harness(tmp_path, **backend), prompts(4, [40])[0]
    request = engine.submit(prompt, prompt_logprobs=5, max_tokens=1)
    engine.run()
    want = full_logits(model, prompt).log_softmax(-1)
    for position, found in enumerate(engine.results[request].prompt_logprobs[1:]):
        for token in (found.chosen, *found.top):
            assert abs(token.logprob - float(want[position, token.token])) < 1e-4
    engine.close()


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    """Adapters on attention, routers, experts, and where there are some on shared experts and dense layers."""
    return {
        name: Family(tmp_path_factory.mktemp("family"), family=name, mlp_only_layers=[0], num_hidden_layers=3)
        for name in NAMES
    }


@each
@on_backends
@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": "padded"}, {"expert_backend": "reference"}], ids=str)
def test_a_mixed_batch_equals_merged_models(
    families: dict[str, Family], backend: dict[str, Any], settings: dict[str, Any], name: str
) -> None:
    family, names = families[name], [None, "adapter-0", "adapter-1", "adapter-2", None, "adapter-1"]
    asked = prompts(1, [3, 9, 20, 31, 14, 5])
    engine = family.engine(max_num_seqs=8, **backend, **settings)
    for adapter, prompt, tokens in zip(names, asked, engine.generate(asked, names), strict=True):
        family.expect(adapter, prompt, tokens)
    engine.close()


# ---- check and plan


@each
@pytest.mark.parametrize("rules", ["reference", None])
def test_check_agrees_with_a_sound_model(tmp_path: Path, rules: str | None, name: str) -> None:
    save_gguf(tiny(name, 1, mlp_only_layers=[0], num_hidden_layers=3), tmp_path / "m.gguf", "Q8_0", "Q8_0")
    plan = planned(tmp_path / "m.gguf", rules=rules)
    lines: list[str] = []
    assert check_model(plan.source, make_backends(plan), list(range(2, 34)), lines.append) is None
    assert all(line.startswith("ok") for line in lines)
    assert sum("mlp.shared_experts " in line for line in lines) == (2 if name == "glm4_moe" else 0)


def test_the_plan_counts_the_shared_experts(tmp_path: Path) -> None:
    sizes = []
    for count in (1, 2):
        save_hf(tiny("glm4_moe", n_shared_experts=count), tmp_path / str(count))
        plan = planned(tmp_path / str(count), rules="reference", dtype="float32")
        sizes += [item.num_bytes for item in plan.memory.items if item.kind is Kind.WEIGHTS]
    assert sizes[1] - sizes[0] == 2 * 3 * 64 * 64 * 4  # layers, projections


def test_shared_experts_are_divided_over_ranks(tmp_path: Path) -> None:
    from engine.ranks.shard import Shard, ShardedSource

    save_hf(tiny("glm4_moe"), tmp_path)
    divided = ShardedSource(open_model(str(tmp_path)), Shard(1, 2)).config
    assert divided.layers[0].mlp.shared.mlp.intermediate == 32
