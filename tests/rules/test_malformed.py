"""Whatever bytes a rules file holds, the answer is rules or a RulesError, never another exception."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rules import RulesError, place
from tests.rules.models import OPERATORS, modules, parse_rule_set

MODULES = modules(2, [0, 1])
MANY = settings(max_examples=150)


def read(data: bytes) -> None:
    try:
        rule_set = parse_rule_set(data, "x.yaml")
        place(rule_set, MODULES)
    except RulesError as e:
        assert str(e).startswith("x.yaml")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "a list of rules"),
        ("[]", 1, "empty"),
        ("match: {name: a}", 1, "a list of rules"),
        ("- 3", 1, "must be a mapping"),
        ("- match: {name: a}", 1, "rule 1: replace: is missing"),
        ("- replace: {class: default}", 1, "rule 1: match: is missing"),
        ("- match: {}\n  replace: {class: default}", 1, "match: needs at least one of them; allowed: name, class"),
        ("- match: {name: 3}\n  replace: {class: default}", 1, "match.name: must be a word, not 3"),
        ("- match: {name: a}\n  replace: {class: 3}", 2, "replace.class: must be a word"),
        ("- match: {name: a}\n  replace: default", 2, "replace: must be a mapping"),
        ("- match: {name: a}\n  replace: {class: default, kwargs: 3}", 2, "replace.kwargs: must be a mapping"),
        ("- match: {name: a, nome: b}\n  replace: {}", 1, "match.nome: unknown key; allowed: name, class"),
        ("- match: {name: a}\n  match: {name: b}\n  replace: {}", 2, "match: written twice, first in line 1"),
        ("- match:\n    name: a\n    name: b\n  replace: {}", 3, "match.name: written twice, first in line 2"),
        (
            "- match: {name: a}\n  replace:\n    class: default\n    kwargs:\n      generate_device: cpu\n"
            "      generate_device: cuda\n",
            6,
            "replace.kwargs.generate_device: written twice, first in line 5",
        ),
        (
            "- match: {name: a}\n  replace: {}\n  because: x",
            3,
            "because: unknown key; allowed: match, replace, recursive",
        ),
        ("- &a {match: {name: a}, replace: {}}\n- *a", 1, "anchors and aliases"),
        ("- match: {name: !!python/name:os.system a}\n  replace: {}", 1, "is not read here"),
        ("- match: {name: 2001-01-01}\n  replace: {}", 1, "a timestamp value"),
        ("- match: {name: !!int many}\n  replace: {}", 1, "'many' is not a int"),
        ("- match: {[a]: b}\n  replace: {}", 1, "a key must be a plain word"),
        ("- a\n---\n- b", 2, "not YAML"),
        ("- match: {name: a", 1, "not YAML"),
        ("\tx", 1, "not YAML"),
    ],
)
def test_malformed_documents(text: str, line: int, message: str) -> None:
    with pytest.raises(RulesError) as e:
        parse_rule_set(text.encode(), "x.yaml")
    assert message in str(e.value) and e.value.line == line


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"- \x00", b"[" * 100_000, b"- a\n" * 400_000, b"\x07"])
def test_hostile_bytes(data: bytes) -> None:
    with pytest.raises(RulesError):
        parse_rule_set(data, "x.yaml")


@MANY
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    read(data)


@MANY
@given(st.text(alphabet="-:[]{}&*!|>'\"%@`#,? \n\tabnmclsreptkwg01.~", max_size=120))
@example("? - a\n: b")
@example("- !!bool x")
@example("- !!float 1:99_")
@example("- match: {name: !!int ''}")
def test_any_punctuation(text: str) -> None:
    read(text.encode())


WORDS = ["match", "replace", "recursive", "name", "class", "kwargs", "generate_device", "prefill_device", "device"]
WORDS += ["generate_op", "prefill_op", "out_device", "backend", "transfer_map", "per_layer_prefill_intput_threshold"]
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 9), st.floats(), st.sampled_from([*OPERATORS, *WORDS, "cpu", "cuda:1"]),
    st.sampled_from(["KExpertsCPU", "KExpertsTorch", "KLinearTorch", "llamafile", "^model$", "experts$", "(", "a{9}"]),
    st.text(max_size=5),
)  # fmt: skip
TREES = st.recursive(
    VALUES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(st.sampled_from(WORDS), VALUES), inner, max_size=4)
    ),
    max_leaves=12,
)


@MANY
@given(TREES)
def test_any_tree(tree: Any) -> None:
    read(yaml.safe_dump(tree, allow_unicode=True).encode())


@MANY
@given(
    operator=st.sampled_from(sorted(OPERATORS)),
    match=st.fixed_dictionaries({}, optional={"name": VALUES, "class": VALUES}),
    kwargs=st.dictionaries(st.sampled_from(WORDS), TREES, max_size=5),
    recursive=VALUES,
)
def test_any_rule_near_the_schema(operator: str, match: Any, kwargs: Any, recursive: Any) -> None:
    rule = {"match": match, "replace": {"class": operator, "kwargs": kwargs}, "recursive": recursive}
    read(yaml.safe_dump([rule], allow_unicode=True).encode())
    rule["match"] = {"class": "torch.nn.Module"}
    rule["recursive"] = False
    read(yaml.safe_dump([rule], allow_unicode=True).encode())


@MANY
@given(data=st.data())
def test_a_good_rule_reads_back(data: st.DataObject) -> None:
    """The strategy above reaches accepted rules too: kwargs drawn from what the operator reads."""
    device = data.draw(st.sampled_from(["cpu", "cuda", "cuda:3"]))
    kwargs = {"generate_device": device, "prefill_device": device}
    rule = {"match": {"class": "torch.nn.Embedding"}, "replace": {"class": "default", "kwargs": kwargs}}
    choice = parse_rule_set(yaml.safe_dump([rule]).encode(), "x.yaml").resolve("model.embed_tokens", "Embedding")
    assert choice is not None and choice.device == device
