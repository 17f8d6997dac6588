"""Forced calls: whatever a model wishes to write, what comes out is read back as calls of the tools that there are."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.errors import ApiError
from api.text.calls.definitions import Tool, ToolUse, parameters_of
from api.text.calls.formats import FORMATS, HARMONY, HARMONY_MARKERS, format_named
from api.text.calls.grammars import grammar_of
from api.text.calls.harmony import grammar_in_channels
from api.text.calls.literals import no_tokens
from api.text.channels import Channels
from api.text.deltas import Reasoning, Text, ToolArguments, ToolStart, joined
from api.text.segments import Layout, Segments
from engine.grammar.compile import matcher_of, tokenizer_of
from engine.messages import GrammarSpec
from testing.models.vocabulary import vocabulary_of
from tests.grammar.vocabulary import END, THINK, THOUGHT, TOKENS, VOCABULARY

MARKERS = sorted(
    {mark for form in FORMATS for mark in (*form.markers, *HARMONY_MARKERS) if re.fullmatch(r"<.*>|\[.*\]", mark)}
)
MARKED = [*TOKENS, *(marker.encode() for marker in MARKERS)]  # a vocabulary in which they are tokens
IDS = {marker: len(TOKENS) + i for i, marker in enumerate(MARKERS)}
TOKENIZERS = {
    False: tokenizer_of(VOCABULARY, [END], len(TOKENS)),
    True: tokenizer_of(vocabulary_of(MARKED, [END, THINK, THOUGHT, *IDS.values()]), [END], len(MARKED)),
}
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


def written(
    spec: GrammarSpec, seed: int, prefix: str = "", limit: int = 600, *, marked: bool = False
) -> tuple[str, bool]:
    """What a model of random wishes writes, after `prefix`; whether it came to an end. `marked`: markers are tokens."""
    matcher, chance = matcher_of(spec, TOKENIZERS[marked]), random.Random(seed)
    tokens = tokens_of(prefix, marked=marked)
    assert matcher.consume_tokens(tokens)
    while len(tokens) < limit:
        bits = matcher.compute_bitmask()
        allowed = [i for i in range(len(MARKED if marked else TOKENS)) if bits[i // 8] >> i % 8 & 1]
        if END in allowed and chance.random() < 0.5:
            return b"".join(MARKED[token] for token in tokens).decode(errors="replace"), True
        wished = [token for token in allowed if token < 256 and chr(token) in TEXT] or [t for t in allowed if t != END]
        if not wished:
            return b"".join(MARKED[token] for token in tokens).decode(errors="replace"), True
        tokens.append(chance.choice(wished))
        assert matcher.consume_tokens(tokens[-1:])
    return b"".join(MARKED[token] for token in tokens).decode(errors="replace"), False


def tokens_of(text: str, *, marked: bool) -> list[int]:
    """Byte by byte, markers as their tokens."""
    parts = re.split("(" + "|".join(map(re.escape, IDS)) + ")", text) if marked else [text]
    return [token for part in parts for token in ([IDS[part]] if part in IDS and marked else part.encode())]


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([form.name for form in FORMATS if not form.channels]),
    st.sampled_from([None, *SCHEMAS]),
    st.booleans(),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_forced_calls_are_calls(form: str, only: str | None, one: bool, seed: int, marked: bool) -> None:
    use = ToolUse(TOOLS, must=True, only=only, one=one or only is not None)
    spec = grammar_of(use, format_named(form), token_of=IDS.get if marked else no_tokens)
    assert spec is not None
    text, ended = written(spec, seed, marked=marked)
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


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("form", [form.name for form in FORMATS if form.closes is not None])
@pytest.mark.parametrize("seed", range(4))
def test_strict_arguments_follow_their_schemas_in_free_text(form: str, seed: int, marked: bool) -> None:
    spec = grammar_of(ToolUse(TOOLS), format_named(form), token_of=IDS.get if marked else no_tokens)
    assert spec is not None
    text, ended = written(spec, seed, f"Let me see. {format_named(form).opens}", marked=marked)
    if ended:
        segments = Segments(Layout(tools=format_named(form), parameters=parameters_of(TOOLS)))
        deltas = joined([*segments.push(text), *segments.finish()])
        (name,) = [delta.name for delta in deltas if isinstance(delta, ToolStart)][:1]
        arguments = "".join(d.text for d in deltas if isinstance(d, ToolArguments) and d.index == 0)
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert written(spec, seed, "No call here.", 40, marked=marked)


def in_channels(text: str) -> list[Any]:
    ids = map(str, itertools.count())
    channels = Channels(Layout(tools=HARMONY, channels=True), lambda: next(ids))
    return joined([*channels.push(text), *channels.finish()])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([None, *SCHEMAS]), st.booleans(), st.booleans(), st.integers(0, 10**6))
def test_calls_in_channels(only: str | None, must: bool, marked: bool, seed: int) -> None:
    """Forced ones, and those of strict tools beside an answer of a schema, whatever was thought and said before."""
    answer = None if must else GrammarSpec("json_schema", json.dumps(SCHEMAS["paint"]), field="response_format")
    use = ToolUse(TOOLS, must=must, only=only)
    spec = grammar_in_channels(use, answer, IDS.get if marked else no_tokens)
    assert spec is not None
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" if seed % 2 else ""
    text, ended = written(spec, seed, thought, marked=marked)
    if not ended:
        return
    deltas = in_channels(text)
    assert bool(thought) <= any(isinstance(delta, Reasoning) for delta in deltas)
    starts = [delta for delta in deltas if isinstance(delta, ToolStart)]
    assert len(starts) == 1 or (not must and not starts)
    if starts:
        arguments = "".join(delta.text for delta in deltas if isinstance(delta, ToolArguments))
        jsonschema.validate(json.loads(arguments), SCHEMAS[starts[0].name])
        assert only is None or starts[0].name == only
    else:
        jsonschema.validate(json.loads(text.rpartition("final<|message|>")[2]), SCHEMAS["paint"])


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(
    ("kind", "text", "said"), [("regex", "[ab]{3}c", "[ab]{3}c"), ("choice", '["a b", "c"]', "a b|c")]
)
def test_final_texts_in_channels(kind: Any, text: str, said: str, marked: bool) -> None:
    spec = grammar_in_channels(None, GrammarSpec(kind, text), IDS.get if marked else no_tokens)
    assert spec is not None
    for seed in range(6):
        output, ended = written(spec, seed, "<|channel|>final<|message|>", marked=marked)
        assert ended and re.fullmatch(said, output.rpartition("<|message|>")[2])


def test_other_grammars_are_refused_in_channels() -> None:
    with pytest.raises(ApiError, match="does not go with answers in channels"):
        grammar_in_channels(None, GrammarSpec("gbnf", 'root ::= "a"'), no_tokens)
    assert grammar_in_channels(None, None, no_tokens) is None


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
