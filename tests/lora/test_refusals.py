"""Whatever cannot be served exactly is refused with the reason and the offending keys: settings and tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import AdapterError, UserError
from engine.lora.files.parse import parse_adapter
from tests.lora import make
from tests.lora.make import PREFIX
from tests.lora.refuse import CONFIG, WEIGHTS, peft_tensors, refused, write_fused

Q = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def fused(tmp_path: Path) -> Path:
    return write_fused(tmp_path / "fused")


# ---- adapter_config.json


@pytest.mark.parametrize("content", ["", "{", "[]", '{"r": 3', "\ufffe", "[" * 100_000])
def test_config_that_is_no_json_object(tmp_path: Path, content: str) -> None:
    make.write(tmp_path, peft_tensors(), None)
    refused(tmp_path, "adapter_config.json is missing")
    (tmp_path / "adapter_config.json").write_text(content)
    refused(tmp_path, r"adapter_config.json (is not valid JSON|must hold a JSON object)")


@pytest.mark.parametrize(
    "fields, key, match",
    [
        ({"peft_type": "LOHA"}, "peft_type", "peft_type is 'LOHA'"),
        ({"peft_type": None}, "peft_type", "peft_type is None"),
        ({"bias": "all"}, "bias", "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias", "LoRA biases"),
        ({"use_dora": True}, "use_dora", "DoRA"),
        ({"modules_to_save": ["norm"]}, "modules_to_save", r"modules_to_save is \['norm'\]"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices", "trained embeddings"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication", "replicated layers"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens", "activated LoRA"),
        ({"use_qalora": True}, "use_qalora", "QALoRA"),
        ({"use_bdlora": {"x": 1}}, "use_bdlora", "block-diagonal"),
        ({"arrow_config": {"x": 1}}, "arrow_config", "Arrow"),
        ({"kasa_config": {"x": 1}}, "kasa_config", "KaSA"),
        ({"monteclora_config": {"x": 1}}, "monteclora_config", "MonteCLoRA"),
        ({"megatron_config": {"x": 1}}, "megatron_config", "Megatron"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights", "changes the base's weights"),
        ({"r": 0}, "r", "r is 0, it must be an integer > 0"),
        ({"r": "3"}, "r", "r is '3'"),
        ({"r": True}, "r", "r is True"),
        ({"r": None}, "r", "r is None"),
        ({"lora_alpha": 0}, "lora_alpha", "must be a number from"),
        ({"lora_alpha": float("nan")}, "lora_alpha", "must be a number from"),
        ({"lora_alpha": None}, "lora_alpha", "lora_alpha is None"),
        ({"use_rslora": "yes"}, "use_rslora", "must be true or false"),
        ({"rank_pattern": [1]}, "rank_pattern", "must be an object"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern['q_proj']", "must be an integer > 0"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern['q_proj']", "must be a number from"),
        ({"alpha_pattern": {"(q": 3}}, "alpha_pattern", r"has the pattern '\(q'"),
        ({"target_parameters": "experts"}, "target_parameters", "must be a list of names"),
    ],
)
def test_settings(tmp_path: Path, fields: dict[str, Any], key: str, match: str) -> None:
    make.write(tmp_path, peft_tensors(), make.lora_config(**fields))
    assert refused(tmp_path, match).keys == [key]


def test_another_base_is_said(tmp_path: Path) -> None:
    make.write(tmp_path, peft_tensors(), make.lora_config(base_model_name_or_path="/m/Other", x=None))
    read = parse_adapter(tmp_path, CONFIG, name="x", base="/models/this")
    assert read.warnings == ["trained on '/m/Other', served on '/models/this'"]
    assert parse_adapter(tmp_path, CONFIG, name="x", base="/elsewhere/other").warnings == []


# ---- ranks and scale


def test_rank_over_the_limit(tmp_path: Path, fused: Path) -> None:
    make.write(tmp_path, peft_tensors(), make.lora_config())
    e = make.write(
        tmp_path / "e", make.fused_3d_keys(WEIGHTS), make.lora_config(6, rank_pattern={"experts.down_proj": 3})
    )
    for folder in (tmp_path, fused, e):
        assert refused(folder, "rank 3 is over --max-adapter-rank 2", max_rank=2).keys
        parse_adapter(folder, CONFIG, name="x", max_rank=3)


@pytest.mark.parametrize("form", ["linear", "expert", "3d"])
def test_rank_that_disagrees_with_the_config(tmp_path: Path, form: str) -> None:
    tensors = {"linear": make.linear_keys, "expert": make.per_expert_keys, "3d": make.fused_3d_keys}[form](WEIGHTS)
    error = refused(
        make.write(tmp_path, tensors, make.lora_config(rank=5)), "rank . of the tensors disagrees with rank 5"
    )
    assert len(error.keys) == 2


@pytest.mark.parametrize("prefix", [PREFIX, ""])
def test_rslora_of_per_expert_keys(tmp_path: Path, prefix: str) -> None:
    tensors = make.linear_keys(WEIGHTS, prefix) | make.per_expert_keys(WEIGHTS, prefix)
    make.write(tmp_path, tensors, make.lora_config(use_rslora=True))
    assert refused(tmp_path, "use_rslora set.*give expert_scaling").keys == ["use_rslora"]
    with pytest.raises(UserError, match="expert_scaling is 'rslora', it must be one of") as caught:
        parse_adapter(tmp_path, CONFIG, name="x", expert_scaling="rslora")
    assert caught.value.field == "expert_scaling"


def test_patterns_on_experts_of_the_fused_file_without_manifest(tmp_path: Path) -> None:
    config = make.lora_config(alpha_pattern={"gate_proj": 3})
    make.write(tmp_path, make.linear_keys(WEIGHTS), config, fused=make.fused_keys(WEIGHTS))
    assert refused(tmp_path, "patterns that match experts").keys == ["gate_proj"]


# ---- tensors


@pytest.mark.parametrize(
    "key, match",
    [
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight", "DoRA"),
        ("model.layers.0.self_attn.q_proj.lora_B.bias", "LoRA biases"),
        ("model.embed_tokens.lora_embedding_A", "embed_tokens"),
        ("model.embed_tokens.lora_A.weight", "embed_tokens"),
        ("lm_head.lora_A.weight", "lm_head"),
        ("lm_head.modules_to_save.weight", "lm_head|modules_to_save"),
        ("model.norm.modules_to_save.weight", "modules_to_save"),
        ("model.layers.0.mlp.shared_expert.up_proj.lora_A.weight", "no place"),
        ("model.layers.0.self_attn.q_norm.lora_A.weight", "no place"),
        ("model.layers.0.self_attn.q_proj.weight", "no place"),
        ("visual.blocks.0.attn.qkv.lora_A.weight", "no place"),
        ("model.layers.-1.self_attn.q_proj.lora_A.weight", "no place"),
    ],
)
def test_tensors_without_a_place(tmp_path: Path, key: str, match: str) -> None:
    tensors = peft_tensors() | {PREFIX + key: torch.zeros(3, 24)}
    assert refused(make.write(tmp_path, tensors, make.lora_config()), match).keys == [PREFIX + key]


def test_many_leftovers_are_counted(tmp_path: Path) -> None:
    extra = {f"{PREFIX}odd.{index}": torch.zeros(1) for index in range(9)}
    error = refused(make.write(tmp_path, peft_tensors() | extra, make.lora_config()), r"and 5 more \(9 in all\)")
    assert sorted(error.keys) == sorted(extra) and str(error).count("odd.") == 4


@pytest.mark.parametrize("module", [Q, "model.layers.2.mlp.experts.1.up_proj"])
@pytest.mark.parametrize("half", "AB")
def test_half_a_pair(tmp_path: Path, module: str, half: str) -> None:
    tensors = peft_tensors()
    del tensors[f"{PREFIX}{module}.lora_{half}.weight"]
    other = f"{PREFIX}{module}.lora_{'AB'['BA'.index(half)]}.weight"
    assert refused(make.write(tmp_path, tensors, make.lora_config()), "without its lora_B").keys == [other]


def test_half_a_pair_of_the_fused_file(tmp_path: Path) -> None:
    tensors = make.fused_keys(WEIGHTS)
    del tensors["layers.0.experts.up_lora_a"]
    folder = make.write(tmp_path, {}, make.lora_config(), fused=tensors)
    assert refused(folder, "without its lora_B").keys == ["layers.0.experts.up_lora_b"]


def test_a_tensor_twice(tmp_path: Path) -> None:
    tensors = peft_tensors()
    tensors[f"{Q}.lora_A.weight"] = tensors[f"{PREFIX}{Q}.lora_A.weight"]
    assert len(refused(make.write(tmp_path, tensors, make.lora_config()), "there twice").keys) == 1


@pytest.mark.parametrize(
    "module, match",
    [
        ("model.layers.3.self_attn.q_proj", "layers that the base does not have"),
        ("model.layers.99.mlp.experts.0.up_proj", "layers that the base does not have"),
        ("model.layers.1.mlp.experts.0.up_proj", "no experts in the base"),
        ("model.layers.0.mlp.experts.4.up_proj", "experts that the base does not have"),
        ("model.layers.1.mlp.gate", "layer 1 of the base is dense"),
        ("model.layers.0.mlp.up_proj", "layer 0 of the base has routed experts"),
    ],
)
def test_places_that_the_base_does_not_have(tmp_path: Path, module: str, match: str) -> None:
    keys = [f"{PREFIX}{module}.lora_{half}.weight" for half in "AB"]
    tensors = peft_tensors() | {keys[0]: torch.zeros(3, 24), keys[1]: torch.zeros(16, 3)}
    assert refused(make.write(tmp_path, tensors, make.lora_config()), match).keys == keys


@pytest.mark.parametrize("layer", [1, 3])
def test_fused_layers_that_the_base_does_not_have(tmp_path: Path, layer: int) -> None:
    tensors = make.fused_keys(WEIGHTS)
    tensors |= {k.replace("layers.0.", f"layers.{layer}."): t for k, t in tensors.items() if "layers.0." in k}
    error = refused(make.write(tmp_path, {}, make.lora_config(), fused=tensors), "no experts in the base")
    assert len(error.keys) == 6


@pytest.mark.parametrize(
    "key, shape",
    [
        (f"{PREFIX}{Q}.lora_A.weight", (3, 23)),
        (f"{PREFIX}{Q}.lora_B.weight", (31, 3)),
        (f"{PREFIX}{Q}.lora_B.weight", (32, 4)),
        (f"{PREFIX}{Q}.lora_A.weight", (3,)),
        (f"{PREFIX}model.layers.0.mlp.experts.2.down_proj.lora_A.weight", (3, 24)),
        (f"{PREFIX}model.layers.0.mlp.experts.2.gate_proj.lora_B.weight", (24, 3)),
    ],
)
def test_shapes_of_pairs(tmp_path: Path, key: str, shape: tuple[int, ...]) -> None:
    folder = make.write(tmp_path, peft_tensors() | {key: torch.zeros(shape)}, make.lora_config())
    assert key in refused(folder, "shapes").keys


@pytest.mark.parametrize("binary", [False, True])
def test_tensors_without_numbers(tmp_path: Path, binary: bool) -> None:
    key = f"{PREFIX}{Q}.lora_A.weight"
    folder = make.write(tmp_path, peft_tensors() | {key: torch.zeros(0, 24)}, make.lora_config(), binary=binary)
    assert key in str(refused(folder, "shapes|impossible shape"))


@pytest.mark.parametrize("shape", [(4, 3, 23), (3, 3, 24), (4, 2, 24), (4, 72)])
def test_shapes_of_the_fused_file(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors = make.fused_keys(WEIGHTS) | {"layers.2.experts.up_lora_a": torch.zeros(shape)}
    error = refused(make.write(tmp_path, {}, make.lora_config(), fused=tensors), r"do not fit the base: \[4, r, 24\]")
    assert "layers.2.experts.up_lora_a" in error.keys


@pytest.mark.parametrize(
    "shapes", [((24, 24), (33, 24)), ((23, 24), (32, 23)), ((24,), (32, 24)), ((24, 24), (32, 12))]
)
def test_shapes_of_fused_3d(tmp_path: Path, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    key = f"{PREFIX}model.layers.0.mlp.experts.base_layer"
    tensors = make.fused_3d_keys(WEIGHTS)
    tensors |= {f"{key}.lora_{half}.weight": torch.zeros(s) for half, s in zip("AB", shapes, strict=True)}
    refused(make.write(tmp_path, tensors, make.lora_config()), "fused expert LoRA that does not fit the base")


def test_square_fused_3d_without_a_version(tmp_path: Path) -> None:
    key = f"{PREFIX}model.layers.0.mlp.experts"
    tensors = {f"{key}.lora_A.weight": torch.zeros(12, 32), f"{key}.lora_B.weight": torch.zeros(32, 12)}
    folder = make.write(tmp_path, tensors, make.lora_config())
    with pytest.raises(AdapterError, match="peft_version does not say"):
        parse_adapter(folder, make.model_config(hidden_size=32), name="x")


def test_experts_in_two_forms(tmp_path: Path) -> None:
    folder = make.write(tmp_path, peft_tensors() | make.fused_3d_keys(WEIGHTS), make.lora_config())
    assert len(refused(folder, "both per expert and on fused experts").keys) == 8


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("form", ["peft", "bin", "fused", "extra"])
def test_values_that_are_not_finite(tmp_path: Path, form: str, value: float) -> None:
    extra = make.extra_keys(make.random_adapter(CONFIG, extra=1))
    tensors, fused = peft_tensors() | extra, make.fused_keys(WEIGHTS)
    tensors = tensors if form != "fused" else {}
    key = {
        "peft": f"{PREFIX}model.layers.2.mlp.experts.3.down_proj.lora_B.weight",
        "bin": f"{PREFIX}{Q}.lora_A.weight",
        "fused": "layers.2.experts.down_lora_b",
        "extra": f"{PREFIX}model.layers.0.mlp.lora_experts.0.le_up.weight",
    }[form]
    holder = fused if form == "fused" else tensors
    holder[key] = holder[key].clone()
    holder[key].view(-1)[-1] = value
    make.write(tmp_path, tensors, make.lora_config(), fused=fused if form == "fused" else None, binary=form == "bin")
    assert refused(tmp_path, "not finite").keys == [key]


def test_no_tensor_at_all(tmp_path: Path) -> None:
    refused(make.write(tmp_path, {}, make.lora_config()), "hold no tensor")


# ---- extra MLPs


@pytest.mark.parametrize(
    "change, match",
    [
        (
            lambda t: t.pop(f"{PREFIX}model.layers.0.mlp.lora_experts.1.le_up.weight"),
            "needs le_gate, le_up and le_down",
        ),
        (
            lambda t: [
                t.pop(f"{PREFIX}model.layers.0.mlp.lora_experts.0.le_{n}.weight") for n in ("gate", "up", "down")
            ],
            "numbered .1., not from 0",
        ),
        (
            lambda t: t.update({f"{PREFIX}model.layers.0.mlp.lora_experts.0.le_down.weight": torch.zeros(24, 9)}),
            "lora_experts shapes",
        ),
    ],
)
def test_extra_mlps(tmp_path: Path, change: Callable[[Tensors], object], match: str) -> None:
    tensors = make.extra_keys(make.random_adapter(CONFIG, extra=2))
    change(tensors)
    assert refused(make.write(tmp_path, tensors, make.lora_config()), match).keys


# ---- beside the fused file


def test_live_keys_beside_the_fused_file(tmp_path: Path) -> None:
    stale = {k: torch.zeros_like(t) if "lora_B" in k else t for k, t in make.per_expert_keys(WEIGHTS).items()}
    live = f"{PREFIX}model.layers.2.mlp.experts.1.up_proj.lora_B.weight"
    stale[live] = torch.full_like(stale[live], 1e-8)
    make.write(tmp_path, make.linear_keys(WEIGHTS) | stale, make.lora_config(), fused=make.fused_keys(WEIGHTS))
    assert refused(tmp_path, "neither zero nor the same beside").keys == [live]


def test_empty_fused_file(tmp_path: Path) -> None:
    make.write(tmp_path, make.linear_keys(WEIGHTS), make.lora_config(), fused={})
    assert refused(tmp_path, "holds no tensor").keys == ["fused_expert_lora.safetensors"]


def test_odd_key_in_the_fused_file(tmp_path: Path) -> None:
    make.write(tmp_path, {}, make.lora_config())
    save_file(
        make.fused_keys(WEIGHTS) | {"layers.0.experts.gate_lora_c": torch.zeros(1)},
        tmp_path / "fused_expert_lora.safetensors",
    )
    assert refused(tmp_path, "no place").keys == ["layers.0.experts.gate_lora_c"]


@pytest.mark.parametrize(("rank", "alpha"), [(6, 4.0), (3, 2.0), (8, 4.0)])
def test_patterns_of_stacked_experts_that_say_otherwise(tmp_path: Path, rank: int, alpha: float) -> None:
    """PEFT stacks gate and up at twice the rank: a pattern of that parameter has twice the rank and the same scale."""
    weights = make.random_adapter(CONFIG, rank=3, alpha=6.0, linears=False)
    patterns = {"rank_pattern": {"experts.gate_up_proj": rank}, "alpha_pattern": {"experts.gate_up_proj": alpha}}
    make.write(tmp_path, make.per_expert_keys(weights), make.lora_config(3, 6.0, **patterns))
    refused(tmp_path, "twice that is expected", expert_scaling="peft")
