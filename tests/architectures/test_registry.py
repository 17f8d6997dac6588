"""Model families: all that is known of one is in its own file, and an unknown one is refused with those that work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import engine.architectures.registry as registry
import engine.architectures.unserved as unserved
from engine.architectures.names import StoredNames
from engine.architectures.registry import architectures, config_from_gguf, config_from_hf
from engine.errors import ModelFileError
from engine.lora.files.formats.linears import linear_sizes
from testing.models.gguf_writer import GGUF_NAMES
from testing.models.tiny import FAMILIES, STATEFUL, tiny_model

ROOT = Path(registry.__file__).parents[2]
_TESTED = FAMILIES | STATEFUL


def test_a_familys_knowledge_is_in_one_place() -> None:
    """No other source file of these names a family."""
    own = {
        Path(registry.__file__),
        Path(unserved.__file__),
        *(ROOT / f"engine/architectures/{family.name}.py" for family in architectures()),
    }
    stored = (rf"\b{f.gguf}\b(?![.-])" for f in architectures())  # llama.cpp is no family
    names = "|".join(
        [*stored, *(n for f in architectures() for n in (f.name, f.model_class.removesuffix("ForCausalLM")))]
    )
    sources = [path for folder in ("engine", "rules", "scheduler") for path in (ROOT / folder).rglob("*.py")]
    assert own < set(sources) and len(sources) > 100
    naming = [
        path.relative_to(ROOT) for path in sources if path not in own and re.search(names, path.read_text(), re.I)
    ]
    assert naming == []


@pytest.mark.parametrize("kind", ["dbrx", "deepseek_v32", None, 7, ["qwen3_moe"]])
def test_an_unknown_family_is_refused_with_those_that_work(kind: object) -> None:
    with pytest.raises(ModelFileError) as caught:
        config_from_hf({"model_type": kind, "architectures": ["Other"]})
    assert repr(kind) in str(caught.value) and caught.value.field == "architectures"
    with pytest.raises(ModelFileError) as stored:
        config_from_gguf({"general.architecture": kind}, {})
    assert repr(kind) in str(stored.value)
    for family in architectures():
        assert f"{family.model_class} ({family.name})" in str(caught.value) and family.gguf in str(stored.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("deepseek_v32", "an indexer chooses is missing"),
        ("glm_moe_dsa", "an indexer chooses is missing; the nearest name is glm4_moe"),
        ("deepseek_v4", "hyper-connections is missing"),
        ("kimi_linear", r"the delta attention \(KDA\)"),
        ("qwen4_moe", "the nearest name is qwen"),
    ],
)
def test_a_known_family_is_refused_with_the_part_that_is_missing(kind: str, said: str) -> None:
    with pytest.raises(ModelFileError, match=said):
        config_from_hf({"model_type": kind, "architectures": ["Other"]})


@pytest.mark.parametrize(("kind", "said"), [("kimi-linear", "of its linear layers"), ("glm-dsa", "an indexer chooses"),
                                            ("minimax-m3", "the nearest name is minimax-m2"),
                                            ("qwen2moee", "the nearest name is qwen2moe")])  # fmt: skip
def test_so_is_a_gguf_file_of_one(kind: str, said: str) -> None:
    with pytest.raises(ModelFileError, match=said):
        config_from_gguf({"general.architecture": kind}, {})


def test_names_that_cannot_be_turned_round_are_refused() -> None:
    with pytest.raises(ValueError, match="must have as many"):
        StoredNames((("experts.*.w1", "experts.gate_proj"),))


WORDS = st.lists(st.sampled_from(["a", "b", "ab", "x", "7", "12"]), min_size=1, max_size=6).map(".".join)


@given(WORDS)
def test_whole_words_are_renamed_and_named_back(name: str) -> None:
    names = StoredNames((("a", "here"), ("b.*.x", "inner.*.last.word")))
    renamed = names.canonical(name)
    assert names.stored(renamed) == name
    assert renamed.split(".").count("ab") == name.split(".").count("ab")
    assert "a" not in renamed.split(".") and not re.search(r"(^|\.)b\.\d+\.x(\.|$)", renamed)


def test_families_are_told_apart() -> None:
    for read in (lambda f: f.name, lambda f: f.model_class):
        assert len({read(family) for family in architectures()}) == len(architectures())
    stored = {family.name: family.gguf for family in architectures()}
    assert stored.items() >= GGUF_NAMES.items() and set(_TESTED) <= set(GGUF_NAMES)


@pytest.mark.parametrize("family", [f for f in architectures() if f.name in _TESTED], ids=lambda family: family.name)
def test_modules_are_those_of_transformers(family: registry.Architecture) -> None:
    """Names, shapes and biases; every projection of a layer is a target of LoRA, and every target occurs."""
    latent = "kv_lora_rank" in _TESTED[family.name][2]
    variants: list[dict] = [{}, {"q_lora_rank": None}] if latent else [{"mlp_only_layers": [1]}]
    assert set().union(*(projections(family, fields) for fields in variants)) == set(family.lora_targets)


def projections(family: registry.Architecture, fields: dict) -> set[str]:
    model = tiny_model(0, family=family.name, num_hidden_layers=3, **fields)
    config = config_from_hf(model.config.to_dict())
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters() if ".experts." not in name}
    theirs = {family.canonical(name): shape for name, shape in theirs.items()}
    ours, targets = {}, set()
    for layer in range(3):
        for module in config.modules(layer):
            at = f"model.layers.{layer}.{module.name}"
            ours |= {f"{at}.weight": module.shape} if module.shape else {}
            ours |= {f"{at}.bias": module.shape[:1]} if module.bias else {}
            if module.kind == "linear":
                targets.add(module.name)
                assert linear_sizes(config, at) == module.shape[::-1]
    for layer, spec in enumerate(config.layers):
        vectors = {f"model.layers.{layer}.{v.name}": v.shape for v in spec.vectors(config.hidden_size)}
        ours |= {name: shape for name, shape in vectors.items() if name in theirs}  # others are buffers
    assert ours == {name: shape for name, shape in theirs.items() if name.startswith("model.layers.")}
    for name in [*ours, *(f"model.layers.1.mlp.experts.12.{part}_proj.weight" for part in ("gate", "up", "down"))]:
        assert family.canonical(family.stored(name)) == name == family.canonical(name)
    names = [name for name, _ in family.module_classes(config)]
    assert len(set(names)) == len(names)
    assert all(name.rpartition(".")[0] in {*names[:at], "model.layers", ""} for at, name in enumerate(names))
    return targets
