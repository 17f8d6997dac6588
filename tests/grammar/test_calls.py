"""Forced calls: whatever a model wishes to write, what comes out is read back as calls of the tools that there are."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.errors import ApiError
from api.text.calls.definitions import Tool, ToolUse, parameters_of
from api.text.calls.formats import format_named
from api.text.calls.grammars import grammar_of
from api.text.deltas import Text, ToolArguments, ToolStart, joined
from api.text.segments import Layout, Segments
from engine.grammar.compile import matcher_of, tokenizer_of
from engine.messages import GrammarSpec
from tests.grammar.vocabulary import END, TOKENS, VOCABULARY

TOKENIZER = tokenizer_of(VOCABULARY, [END], len(TOKENS))
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "paint": {
        "type": "object",
        "properties": {"colour": {"type": "string", "enum": ["red", "light blue"]}, "on": {"type": "boolean"}},
        "required": ["colour", "on"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = tuple(
    Tool(name, {"type": "function", "function": {"name": name, "parameters": schema}}, strict=True)
    for name, schema in SCHEMAS.items()
)
TEXT = 'abc "\\{}<>/\n'


def written(spec: GrammarSpec, seed: int, prefix: str = "", limit: int = 600) -> tuple[str, bool]:
    """What a model of random wishes writes, after `prefix`; whether it came to an end."""
    matcher, chance = matcher_of(spec, TOKENIZER), random.Random(seed)
    tokens = list(prefix.encode())
    assert matcher.consume_tokens(tokens)
    while len(tokens) < limit:
        bits = matcher.compute_bitmask()
        allowed = [i for i in range(len(TOKENS)) if bits[i // 8] >> i % 8 & 1]
        if END in allowed and chance.random() < 0.5:
            return b"".join(TOKENS[token] for token in tokens).decode(errors="replace"), True
        wished = [token for token in allowed if token < 256 and chr(token) in TEXT] or [t for t in allowed if t != END]
        if not wished:
            return b"".join(TOKENS[token] for token in tokens).decode(errors="replace"), True
        tokens.append(chance.choice(wished))
        assert matcher.consume_tokens(tokens[-1:])
    return b"".join(TOKENS[token] for token in tokens).decode(errors="replace"), False


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["hermes", "qwen3_coder", "glm4", "minimax_m2", "llama3", "mistral"]),
    st.sampled_from([None, *SCHEMAS]),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_forced_calls_are_calls(form: str, only: str | None, one: bool, seed: int) -> None:
    use = ToolUse(TOOLS, must=True, only=only, one=one or only is not None)
    spec = grammar_of(use, format_named(form))
    assert spec is not None
    text, ended = written(spec, seed)
    if not ended:
        return
    ids = map(str, itertools.count())
    segments = Segments(Layout(tools=format_named(form), parameters=parameters_of(TOOLS)), lambda: next(ids))
    deltas = joined([*segments.push(text), *segments.finish()])
    assert not [delta for delta in deltas if isinstance(delta, Text)]
    names = [delta.name for delta in deltas if isinstance(delta, ToolStart)]
    assert names and (only is None or names == [only]) and (not one or len(names) == 1)
    for index, name in enumerate(names):
        arguments = "".join(d.text for d in deltas if isinstance(d, ToolArguments) and d.index == index)
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "glm4"])
@pytest.mark.parametrize("seed", range(8))
def test_strict_arguments_follow_their_schemas_in_free_text(form: str, seed: int) -> None:
    spec = grammar_of(ToolUse(TOOLS), format_named(form))
    assert spec is not None
    text, ended = written(spec, seed, "Let me see. <tool_call>")
    if ended:
        segments = Segments(Layout(tools=format_named(form), parameters=parameters_of(TOOLS)))
        deltas = joined([*segments.push(text), *segments.finish()])
        (name,) = [delta.name for delta in deltas if isinstance(delta, ToolStart)][:1]
        arguments = "".join(d.text for d in deltas if isinstance(d, ToolArguments) and d.index == 0)
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert written(spec, seed, "No call here.", 40)


@pytest.mark.parametrize("seed", range(12))
def test_an_answer_of_a_schema_or_a_call(seed: int) -> None:
    answer = GrammarSpec("json_schema", json.dumps(SCHEMAS["paint"]), field="response_format")
    loose = tuple(Tool(tool.name, tool.definition) for tool in TOOLS)
    spec = grammar_of(ToolUse(loose), format_named("hermes"), answer)
    assert spec is not None and spec.field == "response_format"
    text, ended = written(spec, seed)
    if ended and not text.lstrip().startswith("<tool_call>"):
        jsonschema.validate(json.loads(text), SCHEMAS["paint"])
    if seed == 0:  # what a text is to be says nothing about calls
        must = ToolUse(TOOLS, must=True)
        assert grammar_of(must, format_named("hermes"), answer) == grammar_of(must, format_named("hermes"))
    for wrong in (ToolUse(TOOLS, must=True), ToolUse(TOOLS)):
        with pytest.raises(ApiError) as caught:
            grammar_of(wrong, format_named("hermes"), GrammarSpec("regex", "a", field="regex"))
        assert caught.value.param == "regex"


def test_nothing_is_enforced_without_need() -> None:
    loose = tuple(Tool(tool.name, tool.definition) for tool in TOOLS)
    assert grammar_of(ToolUse(loose), format_named("hermes")) is None
