"""Whatever the schema and the sampling: what is written parses and is valid."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine.messages import Finished, GrammarSpec
from tests.grammar.writer import Writer

NAMES = st.text('ab é"\\/{}\n', min_size=1, max_size=4)
SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "number", "minimum": -3, "maximum": 2.5}]),
    st.tuples(st.integers(-999, 999), st.integers(0, 500)).map(
        lambda ends: {"type": "integer", "minimum": ends[0], "maximum": ends[0] + ends[1]}
    ),
    st.tuples(st.integers(0, 3), st.integers(0, 6)).map(
        lambda ends: {"type": "string", "minLength": ends[0], "maxLength": ends[0] + ends[1]}
    ),
    st.sampled_from(["^[a-c]{2,4}$", "^x\\d{3}$", "^(ab|é){1,3}$"]).map(
        lambda form: {"type": "string", "pattern": form}
    ),
    st.sampled_from(["date", "uuid", "ipv4"]).map(lambda form: {"type": "string", "format": form}),
    st.lists(st.none() | st.booleans() | st.integers() | NAMES, min_size=1, max_size=4).map(lambda v: {"enum": v}),
    st.recursive(
        st.none() | st.booleans() | st.integers(-9, 9) | NAMES,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
        max_leaves=3,
    ).map(lambda value: {"const": value}),
)


def _object(fields: dict[str, Any], optional: int) -> dict[str, Any]:
    required = list(fields)[optional:]
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(_object, st.dictionaries(NAMES, inner, max_size=3), st.integers(0, 3)),
        st.tuples(inner, st.integers(0, 1), st.integers(0, 2)).map(
            lambda x: {"type": "array", "items": x[0], "minItems": x[1], "maxItems": x[1] + x[2]}
        ),
        st.lists(inner, min_size=1, max_size=2).map(
            lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda inner: {"anyOf": inner}),
    )


_PLAIN = st.recursive(SCALARS, _containers, max_leaves=5)
SCHEMAS = (
    st.just(True)
    | _PLAIN
    | _PLAIN.map(lambda inner: {"$defs": {"d": inner}, "type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": 2})
)
SAMPLING = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]), "seed": st.integers(0, 2**31)},
    optional={
        "top_k": st.sampled_from([1, 3, 40]),
        "top_p": st.sampled_from([0.1, 0.9]),
        "repetition_penalty": st.just(1.3),
        "presence_penalty": st.just(1.5),
        "logprobs": st.just(2),
    },
)
SETTINGS = settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@SETTINGS
@given(st.lists(st.tuples(SCHEMAS, SAMPLING), min_size=1, max_size=4))
def test_json_of_a_schema_parses_and_is_valid(writer: Writer, asked: list[tuple[Any, dict[str, Any]]]) -> None:
    beside = {"temperature": 1.0, "seed": 7, "max_tokens": 12}
    alone = writer.ask(None, **beside)
    writer.run()
    rids = [writer.ask(GrammarSpec("json_schema", json.dumps(schema)), **how) for schema, how in asked]
    bystander = writer.ask(None, **beside)
    writer.run()
    assert writer.results[bystander].tokens == writer.results[alone].tokens
    for rid, (schema, _) in zip(rids, asked, strict=True):
        end = writer.results[rid].end
        assert isinstance(end, Finished), (end, schema)
        if end.reason == "stop":  # a greedy one may write whitespace, or digits, until the limit
            value = json.loads(writer.text(rid).decode())
            jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(value)


ATOMS = st.sampled_from(["a", "b", "[a-c]", "\\d", "(?:ab|bc)", "é", "\\.", "[^a]", "x?", "(?:y|)", "/", '"'])
REGEXES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(lambda x: f"(?:{x[0]}){{{x[1]},{x[1] + x[2]}}}"),
    ),
    max_leaves=6,
)


@SETTINGS
@given(st.lists(st.tuples(REGEXES, SAMPLING), min_size=1, max_size=4))
def test_text_of_a_regex_matches(writer: Writer, asked: list[tuple[str, dict[str, Any]]]) -> None:
    rids = [writer.ask(GrammarSpec("regex", regex), **how) for regex, how in asked]
    writer.run()
    for rid, (regex, _) in zip(rids, asked, strict=True):
        end = writer.results[rid].end
        assert isinstance(end, Finished) and end.reason == "stop", (end, regex)
        assert re.fullmatch(regex, writer.text(rid).decode()), (regex, writer.text(rid))


@SETTINGS
@given(st.lists(st.text(max_size=6).filter(str.strip), min_size=1, max_size=5), SAMPLING)
def test_a_choice_is_one_of_its_texts(writer: Writer, texts: list[str], how: dict[str, Any]) -> None:
    rid = writer.ask(GrammarSpec("choice", json.dumps(texts)), **how)
    writer.run()
    assert writer.text(rid).decode() in texts


@pytest.mark.parametrize("mode", [{"overlap": True, "speculate": "ngram:3"}, {"speculate": "ngram:3:always"}], ids=str)
@settings(
    max_examples=4,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.tuples(SCHEMAS, SAMPLING), min_size=1, max_size=3))
def test_modes_write_the_same(start: Any, writer: Writer, mode: dict[str, Any], asked: list[Any]) -> None:
    tokens = []
    for engine in (writer, start(**mode)):
        rids = [engine.ask(GrammarSpec("json_schema", json.dumps(schema)), **how) for schema, how in asked]
        engine.run()
        tokens.append([engine.results[rid].tokens for rid in rids])
    assert tokens[0] == tokens[1]
