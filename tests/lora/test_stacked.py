"""LoRA of all experts under one key, halves that experts share, and keys inside other programs' containers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine.architectures.mixtral import MIXTRAL
from engine.lora.adapter import AdapterWeights
from engine.lora.files.detect import WRAPPERS
from engine.lora.files.inspect import describe
from engine.lora.files.parse import parse_adapter
from tests.engine.family import Family
from tests.engine.parity import prompts
from tests.lora import make
from tests.lora.forms import FORMS, assert_same, write_form
from tests.lora.merge import merge
from tests.lora.refuse import CONFIG, refused

HALVES = [f"{projection}_{half}" for projection in ("gate", "up", "down") for half in "ab"]
SHARED = st.sets(st.sampled_from(HALVES))


def shared(weights: AdapterWeights, names: set[str]) -> AdapterWeights:
    """With the first expert's values of some halves for all experts."""
    for lora in weights.experts.values():
        for name in names:
            tensor = getattr(lora, name)
            tensor[:] = tensor[:1].clone()
    return weights


def stacked_keys(weights: AdapterWeights, names: set[str], flat: bool = False) -> dict[str, torch.Tensor]:
    """One key for each half of a projection; `flat`: what is shared has no axis of experts."""
    tensors = {}
    for layer, lora in weights.experts.items():
        for name in HALVES:
            projection, half = name.split("_")
            tensor = getattr(lora, name)
            if name in names:
                tensor = tensor[0] if flat else tensor[:1]
            key = f"{make.PREFIX}model.layers.{layer}.mlp.experts.{projection}_proj"
            tensors[f"{key}.lora_{half.upper()}.weight"] = tensor
    return tensors


def gate_up_keys(weights: AdapterWeights) -> dict[str, torch.Tensor]:
    """gate and up in one, with an A for both."""
    tensors = {}
    for layer, lora in weights.experts.items():
        at = f"{make.PREFIX}model.layers.{layer}.mlp.experts"
        tensors |= {f"{at}.down_proj.lora_A.weight": lora.down_a, f"{at}.down_proj.lora_B.weight": lora.down_b}
        tensors[f"{at}.gate_up_proj.lora_A.weight"] = lora.gate_a
        tensors[f"{at}.gate_up_proj.lora_B.weight"] = torch.cat([lora.gate_b, lora.up_b], dim=1)
    return tensors


def with_one_a(weights: AdapterWeights) -> AdapterWeights:
    for lora in weights.experts.values():
        lora.up_a[:] = lora.gate_a
    return weights


def outer_keys(weights: AdapterWeights, names: set[str], flat: bool = False) -> dict[str, torch.Tensor]:
    """What is shared under one key, all else per expert."""
    tensors = {k: t for k, t in make.per_expert_keys(weights).items() if half_of(k) not in names}
    return tensors | {k: t for k, t in stacked_keys(weights, names, flat).items() if half_of(k) in names}


def half_of(key: str) -> str:
    """ "gate_a" of "...gate_proj.lora_A.weight"."""
    *_, projection, half, _ = key.split(".")
    return f"{projection.removesuffix('_proj')}_{half[-1].lower()}"


@given(SHARED, st.booleans(), st.booleans())
@hypothesis_settings(max_examples=30)
def test_one_key_for_all_experts(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], flat: bool, bare: bool
) -> None:
    weights = shared(make.random_adapter(CONFIG, linears=False), names)
    tensors = stacked_keys(weights, names, flat)
    if bare:
        tensors = {key.removesuffix(".weight"): tensor for key, tensor in tensors.items()}
    read = parse_adapter(make.write(tmp_path_factory.mktemp("a"), tensors, make.lora_config()), CONFIG, name="x")
    assert read.format == "peft-stacked" and read.warnings == []
    assert_same(read, weights)


@given(SHARED.filter(lambda names: all({f"{p}_a", f"{p}_b"} - names for p in ("gate", "up", "down"))), st.booleans())
@hypothesis_settings(max_examples=30)
def test_a_half_that_experts_share_beside_halves_of_single_experts(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], flat: bool
) -> None:
    weights = shared(make.random_adapter(CONFIG, linears=False), names)
    tensors = outer_keys(weights, names, flat)
    read = parse_adapter(make.write(tmp_path_factory.mktemp("a"), tensors, make.lora_config()), CONFIG, name="x")
    assert read.format == "peft-per-expert" and read.warnings == []
    assert_same(read, weights)


def test_gate_and_up_in_one(tmp_path: Path) -> None:
    weights = with_one_a(make.random_adapter(CONFIG, linears=False))
    folder = make.write(tmp_path, gate_up_keys(weights), make.lora_config())
    assert_same(parse_adapter(folder, CONFIG, name="x"), weights)
    said = describe(folder, CONFIG).text
    assert "stacked down [4, 3, 16] [4, 24, 3], gate_up [4, 3, 24] [4, 32, 3]: layers 0, 2" in said


def test_patterns_and_the_files_own_names(tmp_path: Path) -> None:
    config = make.model_config()
    weights = make.random_adapter(config, linears=False)
    fields = {"alpha_pattern": {"experts.up_proj": 12}, "use_rslora": True}
    folder = make.write(tmp_path, stacked_keys(weights, set()), make.lora_config(**fields))
    lora = parse_adapter(folder, config, name="x").experts[0]
    assert (lora.gate_scale, lora.up_scale) == (pytest.approx(6 / 3**0.5), pytest.approx(12 / 3**0.5))
    assert MIXTRAL.canonical("model.layers.1.block_sparse_moe.experts.w3") == "model.layers.1.mlp.experts.up_proj"


def test_layers_and_projections_without_lora_are_zero(tmp_path: Path) -> None:
    weights = make.random_adapter(CONFIG, linears=False)
    tensors = {k: t for k, t in stacked_keys(weights, set()).items() if ".0." in k and "up_proj" not in k}
    read = parse_adapter(make.write(tmp_path, tensors, make.lora_config()), CONFIG, name="x")
    assert read.warnings == ["layer 2: no expert LoRA, taken as zero", "layer 0: no expert LoRA on up, taken as zero"]
    assert not read.experts[0].up_b.any()


AT = f"{make.PREFIX}model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    "shape_a, shape_b, name, match",
    [
        ((4, 3, 24), (4, 16, 5), "gate_proj", "do not fit the base"),
        ((3, 3, 24), (4, 16, 3), "gate_proj", "do not fit the base"),
        ((4, 3, 16), (4, 16, 3), "gate_proj", "do not fit the base"),
        ((12, 24), (16, 12), "gate_proj", "rank 12 of the tensors disagrees with rank 3"),
        ((4, 3, 24), (4, 16, 3), "gate_up_proj", "do not fit the base"),
        ((24,), (16,), "gate_proj", "do not fit the base"),
    ],
)
def test_shapes_that_do_not_fit(
    tmp_path: Path, shape_a: tuple[int, ...], shape_b: tuple[int, ...], name: str, match: str
) -> None:
    tensors = {f"{AT}.{name}.lora_A.weight": torch.ones(shape_a), f"{AT}.{name}.lora_B.weight": torch.ones(shape_b)}
    refused(make.write(tmp_path, tensors, make.lora_config()), match)


def test_two_forms_at_once(tmp_path: Path) -> None:
    weights = make.random_adapter(CONFIG, linears=False)
    stacked = stacked_keys(weights, set())
    down = {key: tensor for key, tensor in stacked.items() if "down_proj" in key}
    gate = {key: tensor for key, tensor in make.per_expert_keys(weights).items() if "gate_proj" in key}
    refused(make.write(tmp_path / "a", down | gate, make.lora_config()), "in two forms")
    refused(make.write(tmp_path / "b", stacked | gate_up_keys(weights), make.lora_config()), "both together and apart")
    lonely = {key: tensor for key, tensor in stacked.items() if "lora_B" in key}
    refused(make.write(tmp_path / "c", lonely, make.lora_config()), "without its lora_B")


# ---- containers


def wrapped(key: str, words: list[str], places: list[int]) -> str:
    parts = key.split(".")
    for word, place in zip(words, places, strict=True):
        parts.insert(place % (len(parts) - 2), word)  # not between lora_A and weight
    return ".".join(parts)


@given(st.data(), st.sampled_from([*FORMS]))
@hypothesis_settings(max_examples=40)
def test_containers_around_modules_have_no_meaning(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, form: str
) -> None:
    """Wherever they are, in every form."""
    weights = make.random_adapter(CONFIG)
    words = data.draw(st.lists(st.sampled_from(sorted(WRAPPERS)), min_size=1, max_size=3))
    places = data.draw(st.lists(st.integers(0, 20), min_size=len(words), max_size=len(words)))
    folder = write_form(tmp_path_factory.mktemp("a"), form, weights, lambda key: wrapped(key, words, places))
    read = parse_adapter(folder, CONFIG, name="x")
    assert read.format == FORMS[form]
    assert_same(read, weights)


def test_a_tensor_with_and_without_a_container_is_there_twice(tmp_path: Path) -> None:
    weights = make.random_adapter(CONFIG, experts=False)
    tensors = make.linear_keys(weights)
    again = {key.replace("model.layers", "model.language_model.layers"): tensor for key, tensor in tensors.items()}
    refused(make.write(tmp_path, tensors | again, make.lora_config()), "the same tensor is there twice")


@pytest.mark.parametrize(
    "pattern", ["model.language_model.layers.0.self_attn.q_proj", r"^language_model\.model\.layers\.0.*q_proj"]
)
def test_patterns_that_name_the_language_model(tmp_path: Path, pattern: str) -> None:
    key = f"{make.PREFIX}model.language_model.layers.0.self_attn.q_proj"
    inner, out = make.linear_shapes(CONFIG, 0)["model.layers.0.self_attn.q_proj"]
    tensors = {f"{key}.lora_A.weight": torch.ones(7, inner), f"{key}.lora_B.weight": torch.ones(out, 7)}
    read = parse_adapter(make.write(tmp_path, tensors, make.lora_config(rank_pattern={pattern: 7})), CONFIG, name="x")
    assert read.rank == 7 and read.warnings == []


# ---- served


def test_every_form_alone_and_in_one_batch(tmp_path: Path) -> None:
    """Equal to the adapters merged in float32."""
    family = Family(tmp_path, count=0)
    config = make.config_of(family.base)

    def add(name: str, weights: AdapterWeights, tensors: dict[str, torch.Tensor]) -> None:
        tensors = make.linear_keys(weights) | tensors
        family.paths[name] = make.write(tmp_path / name, tensors, make.lora_config())
        family.merged[name] = merge(copy.deepcopy(family.base), weights)

    def drawn(seed: int) -> AdapterWeights:
        return make.random_adapter(config, seed=seed, scale=0.3)

    one, two = {"gate_a", "up_a", "down_b"}, set(HALVES)
    add("stacked", weights := drawn(1), stacked_keys(weights, set()))
    add("fused", weights := with_one_a(drawn(2)), gate_up_keys(weights))
    add("outer", weights := shared(drawn(3), one), outer_keys(weights, one))
    add("all", weights := shared(drawn(4), two), stacked_keys(weights, two))
    weights = drawn(5)
    tensors = make.linear_keys(weights) | make.per_expert_keys(weights)
    add("wrapped", weights, {})
    named: dict[str, Any] = {f"module._orig_mod.{key}": tensor for key, tensor in tensors.items()}
    make.write(tmp_path / "wrapped", named, make.lora_config())
    engine = family.engine(max_num_seqs=8, max_adapter_slots=5)
    names = [None, *family.paths]
    prompt = prompts(1, [20])[0]
    alone = [engine.generate([prompt], [name])[0] for name in names]
    together = engine.generate([prompt] * len(names), names)
    engine.close()
    assert alone == together and len({tuple(tokens) for tokens in together}) == len(names)
    for name, tokens in zip(names, together, strict=True):
        family.expect(name, prompt, tokens)
