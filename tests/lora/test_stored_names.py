"""Adapters that name modules as their base's files do: Mixtral's, from before transformers 5."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from peft import PeftModel
from peft.utils.other import get_pattern_key
from torch import nn

from engine.architectures.mixtral import MIXTRAL
from engine.errors import AdapterError
from engine.lora.files.convert import convert
from engine.lora.files.inspect import describe
from engine.lora.files.parse import parse_adapter
from engine.lora.files.writer import FORMS as WRITTEN
from engine.lora.files.writer import write_adapter
from testing.models.tiny import save_hf, tiny_model
from tests.lora import make
from tests.lora.forms import FORMS, assert_same, write_form
from tests.lora.merge import all_deltas, merge

PROMPT = torch.tensor([[3, 14, 15, 92, 65, 35, 89, 79, 32, 38]])
OLD = f"{make.PREFIX}model.layers.1.block_sparse_moe"


def base() -> nn.Module:
    return tiny_model(seed=4, family="mixtral", num_experts=4)


CONFIG = make.config_of(base())


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(PROMPT).logits[0]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_under_both_names(tmp_path: Path, form: str) -> None:
    weights = make.random_adapter(CONFIG, extra=2)
    for name in (MIXTRAL.stored, MIXTRAL.canonical):
        read = parse_adapter(write_form(tmp_path / name.__name__, form, weights, name), CONFIG, name="x")
        assert read.format == f"{FORMS[form]}+extra-mlps" and read.warnings == []
        assert_same(read, weights)


def test_extra_mlps_of_their_own_file_count_under_either_name(tmp_path: Path) -> None:
    weights, older = make.random_adapter(CONFIG, extra=2), make.random_adapter(CONFIG, extra=2, seed=7)
    tensors = make.linear_keys(weights) | make.extra_keys(older)
    make.write(tmp_path / "extra", make.named(make.extra_keys(weights), MIXTRAL.stored), None)
    folder = make.write(tmp_path / "adapter", tensors, make.lora_config())
    (tmp_path / "extra/adapter_model.safetensors").rename(folder / "lora_experts.safetensors")
    read = parse_adapter(folder, CONFIG, name="x")
    weights.experts.clear()
    assert_same(read, weights)
    assert read.warnings == [
        "12 tensors of lora_experts.safetensors count instead of those in adapter_model.safetensors"
    ]


KEYS = (
    "q_proj", "self_attn.v_proj", r".*\.o_proj", "gate", r"block_sparse_moe\.gate",
    "model.layers.1.block_sparse_moe.gate", "w1", r"experts\.(0|3)\.w2",
    r"layers.1.block_sparse_moe.experts.\d+.w[13]", r".*\.3\.w\d", "w", "e.gate",
)  # fmt: skip
RANKS = st.dictionaries(st.sampled_from(KEYS), st.integers(1, 6), max_size=4)
ALPHAS = st.dictionaries(st.sampled_from(KEYS), st.sampled_from([1.0, 3.0, 8.0, 0.5]), max_size=4)


@given(RANKS, ALPHAS, st.booleans(), st.booleans())
@hypothesis_settings(max_examples=30)
def test_patterns_in_the_words_of_the_files(
    tmp_path_factory: pytest.TempPathFactory, ranks: dict[str, int], alphas: dict[str, float], rslora: bool, old: bool
) -> None:
    """By PEFT's own matching on the stored names, whichever names the tensors have."""
    generator, tensors, want = torch.Generator().manual_seed(0), {}, {}

    def add(module: str, size_in: int, size_out: int) -> torch.Tensor:
        stored = MIXTRAL.stored(module)
        rank = ranks.get(get_pattern_key(ranks.keys(), stored), 3)
        alpha = alphas.get(get_pattern_key(alphas.keys(), stored), 6.0)
        a, b = torch.randn(rank, size_in, generator=generator), torch.randn(size_out, rank, generator=generator)
        key = f"{make.PREFIX}{stored if old else module}"
        tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = a, b
        return (alpha / math.sqrt(rank) if rslora else alpha / rank) * (b @ a)

    for layer in range(CONFIG.num_hidden_layers):
        for module, shape in make.linear_shapes(CONFIG, layer).items():
            want[module] = add(module, *shape)
        for name in ("gate", "up", "down"):
            deltas = [add(f"model.layers.{layer}.mlp.experts.{e}.{name}_proj", 64, 64) for e in range(4)]
            want[f"layers.{layer}.{name}"] = torch.stack(deltas)
    config = make.lora_config(rank_pattern=ranks, alpha_pattern=alphas, use_rslora=rslora)
    folder = make.write(tmp_path_factory.mktemp("patterns"), tensors, config)
    read = parse_adapter(folder, CONFIG, name="x", expert_scaling="peft")
    got = all_deltas(read)
    assert sorted(got) == sorted(want)
    for name, delta in want.items():
        torch.testing.assert_close(got[name], delta, rtol=1e-5, atol=1e-5)
    unmatched = [key for key in {**ranks, **alphas} if key in ("w", "e.gate")]
    assert all(key in " ".join(read.warnings) for key in unmatched)


def test_a_pattern_on_experts_of_a_fused_file_is_seen_in_either_words(tmp_path: Path) -> None:
    for pattern in ("w1", r"block_sparse_moe\.experts\.\d+\.w2", "gate_proj"):
        folder = write_form(tmp_path / str(len(pattern)), "A'", make.random_adapter(CONFIG))
        make.write(folder, None, make.lora_config(alpha_pattern={pattern: 9}))
        with pytest.raises(AdapterError, match="patterns that match experts") as caught:
            parse_adapter(folder, CONFIG, name="x")
        assert caught.value.keys == [pattern]


# ---- refusals name the key as it is stored


REFUSED: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    f"{OLD}.experts.1.w4.lora_A.weight": ({}, "no place"),
    f"{OLD}.experts.7.w1.lora_A.weight": ({f"{OLD}.experts.7.w1.lora_B.weight": torch.ones(64, 3)}, "experts that"),
    f"{OLD}.experts.1.w3.lora_A.weight": ({}, "without its lora_B"),
    f"{OLD}.gate.lora_A.weight": ({f"{OLD}.gate.lora_B.weight": torch.ones(5, 3)}, "do not fit the base"),
    f"{OLD}.w1.lora_A.weight": ({}, "no place"),
    f"{OLD.replace('.1.', '.9.')}.gate.lora_A.weight": (
        {f"{OLD.replace('.1.', '.9.')}.gate.lora_B.weight": torch.ones(4, 3)},
        "layers that the base",
    ),
}


@pytest.mark.parametrize("key", REFUSED)
def test_refusals(tmp_path: Path, key: str) -> None:
    more, reason = REFUSED[key]
    folder = make.write(tmp_path, {key: torch.ones(3, 64), **more}, make.lora_config())
    with pytest.raises(AdapterError, match=reason) as caught:
        parse_adapter(folder, CONFIG, name="x")
    assert key in caught.value.keys and key in str(caught.value)


@pytest.mark.parametrize("kind", ["linears", "experts", "extra"])
def test_a_tensor_under_both_names_is_there_twice(tmp_path: Path, kind: str) -> None:
    weights = make.random_adapter(CONFIG, linears=kind == "linears", experts=kind == "experts", extra=kind == "extra")
    tensors = make.linear_keys(weights) | make.per_expert_keys(weights) | make.extra_keys(weights)
    tensors = {key: tensor for key, tensor in tensors.items() if ".mlp." in key}
    old = make.named(tensors, MIXTRAL.stored)
    with pytest.raises(AdapterError, match="the same tensor is there twice") as caught:
        parse_adapter(make.write(tmp_path, tensors | old, make.lora_config()), CONFIG, name="x")
    assert len(caught.value.keys) == len(tensors)


# ---- the same to PEFT


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
@pytest.mark.parametrize("linears", [False, True])
def test_peft_computes_the_same(tmp_path: Path, linears: bool) -> None:
    """From the old names, and from what PEFT saves of them again."""
    weights = make.random_adapter(CONFIG, rank=4, alpha=8.0, linears=linears, scale=0.1)
    weights.linears = {module: pair for module, pair in weights.linears.items() if "self_attn" in module}
    tensors = make.named(make.linear_keys(weights) | make.per_expert_keys(weights), MIXTRAL.stored)
    targets = ["w1", "w2", "w3"] + (["q_proj", "k_proj", "v_proj", "o_proj"] if linears else [])
    fields: dict[str, Any] = {"target_modules": targets}
    old = make.write(tmp_path / "old", tensors, make.lora_config(4, 8.0, **fields))
    model = PeftModel.from_pretrained(base(), old).eval()
    expected = logits(model)
    model.peft_config["default"].base_model_name_or_path = None  # or peft looks for it on the network
    model.save_pretrained(tmp_path / "new")
    assert (logits(base()) - expected).abs().max() > 0.02
    for folder, form in ((old, "peft-per-expert"), (tmp_path / "new", "peft-fused-3d")):
        read = parse_adapter(folder, CONFIG, name="x")
        assert read.format == form
        assert (logits(merge(base(), read)) - expected).abs().max() < 2e-5


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
@pytest.mark.parametrize("form", WRITTEN)
def test_peft_reads_what_is_written(tmp_path: Path, form: str) -> None:
    """All of it, in each form. The names are those of the files: PEFT knows no others."""
    save_hf(base(), tmp_path / "base")
    weights = make.random_adapter(CONFIG, scale=0.1)
    weights.linears = {module: pair for module, pair in weights.linears.items() if "self_attn" in module}
    write_adapter(weights, tmp_path / "first", WRITTEN[1 - WRITTEN.index(form)], base=str(tmp_path / "base"))
    convert(str(tmp_path / "first"), form, str(tmp_path / "made"), None)
    model = PeftModel.from_pretrained(base(), tmp_path / "made").eval()
    assert (logits(merge(base(), weights)) - logits(model)).abs().max() < 2e-5
    assert_same(parse_adapter(tmp_path / "made", CONFIG, name="x"), weights)


# ---- inspect


@pytest.mark.parametrize("with_base", [False, True])
def test_inspect(tmp_path: Path, with_base: bool) -> None:
    weights = make.random_adapter(CONFIG)
    folder = write_form(tmp_path, "B", weights, MIXTRAL.stored)
    make.write(folder, None, make.lora_config(use_rslora=True, alpha_pattern={"w1": 9}))
    said = describe(folder, CONFIG if with_base else None, expert_scaling="alpha/r").text.splitlines()
    assert "experts    gate up down: 0-3 of layers 0-1" in said
    assert any(line.startswith("modules    mlp.gate, self_attn.k_proj") for line in said)
    assert "experts'   scale not settled by the files: load with expert_scaling alpha/r, alpha/sqrt(r) or peft" in said
    assert said[-1].startswith("served     yes" if with_base else "served     not checked")
