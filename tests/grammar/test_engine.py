"""Requests with a grammar in an engine: what they write, what they wait for, what they leave alone."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

from engine.errors import UserError
from engine.grammar.compile import check
from engine.messages import Abort, Cancelled, Failed, Finished, GrammarSpec, Refused
from tests.grammar.vocabulary import END, THINK, THOUGHT
from tests.grammar.writer import Writer

Start = Callable[..., Writer]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["ab", "cd"]}, "c": {"type": "boolean"}},
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
JSON = GrammarSpec("json_schema", json.dumps(SCHEMA))
MODES: list[dict[str, Any]] = [{}, {"overlap": True}, {"speculate": "ngram:4:always"}, {"speculate": "mtp:2:always"}]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
def test_modes_write_the_same_valid_tokens(start: Start, temperature: float) -> None:
    written = []
    for mode in MODES:
        engine = start(**mode)
        rids = [engine.ask(JSON, temperature=temperature, seed=seed) for seed in range(6)]
        rids.append(engine.ask(GrammarSpec("regex", "((ab|bc){3}){4}c*"), temperature=temperature))
        rids.append(engine.ask(GrammarSpec("regex", "x+y", after=THOUGHT), logit_bias={THOUGHT: 20.0}, temperature=1.0))
        engine.run()
        written.append([engine.results[rid].tokens for rid in rids])
        for rid in rids[:6]:
            assert engine.results[rid].end == Finished(
                request_id=rid, reason="stop", prompt_tokens=3, output_tokens=len(engine.results[rid].tokens),
                cached_tokens=0, stop_token=END,
            )  # fmt: skip
            value = json.loads(engine.text(rid))
            assert list(value) == ["a", "b", "c"] and value["b"] in ("ab", "cd") and isinstance(value["c"], bool)
        assert re.fullmatch(b"((ab|bc){3}){4}c*", engine.text(rids[6]))
        assert re.fullmatch(b".*</think>x+y", engine.text(rids[7]), re.DOTALL)
    assert all(tokens == written[0] for tokens in written)


@pytest.mark.parametrize("thinks", [False, True])
def test_reasoning_may_come_before_a_grammar(start: Start, thinks: bool) -> None:
    spec = GrammarSpec("regex", "x+y", after=THOUGHT, opens=THINK)
    bias = {THINK: 90.0 if thinks else -90.0, THOUGHT: 30.0}
    written = []
    for mode in MODES:
        engine = start(**mode)
        rids = [
            engine.ask(spec, logit_bias=bias, presence_penalty=2.0, frequency_penalty=2.0, temperature=1.0, seed=seed)
            for seed in range(4)
        ]
        engine.run()
        written.append([engine.results[rid].tokens for rid in rids])
        form = b"<think>.*</think>x+y" if thinks else b"x+y"
        for rid in rids:
            assert re.fullmatch(form, engine.text(rid), re.DOTALL)
    assert all(tokens == written[0] for tokens in written)


def test_output_cut_inside_a_grammar_ended_by_length(writer: Writer) -> None:
    rid = writer.ask(GrammarSpec("regex", "a{50}"), max_tokens=7)
    writer.run()
    end = writer.results[rid].end
    assert isinstance(end, Finished) and end.reason == "length"
    assert writer.text(rid) == b"a" * 7


@pytest.mark.parametrize(
    ("grammar", "sampling", "field"),
    [
        (GrammarSpec("regex", "a("), {}, "grammar"),
        (GrammarSpec("lark", "start: missing"), {}, "grammar"),
        (GrammarSpec("lark", "start: <no_such_token>"), {}, "grammar"),
        (GrammarSpec("json_schema", '{"type": "strin"}'), {}, "grammar"),
        (GrammarSpec("json_schema", "{"), {}, "grammar"),
        (GrammarSpec("json_schema", "false"), {}, "grammar"),
        (GrammarSpec("regex", "a", after=300), {}, "grammar"),
        (GrammarSpec("regex", "a", after=THOUGHT, opens=300), {}, "grammar"),
        (GrammarSpec("regex", "a", opens=THINK), {}, "grammar"),
        (GrammarSpec("regex", "a"), {"ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    writer: Writer, grammar: GrammarSpec, sampling: dict[str, Any], field: str
) -> None:
    rid = writer.ask(grammar, **sampling)
    writer.run()
    end = writer.results[rid].end
    assert isinstance(end, Refused) and (end.status, end.field) == (400, field), end


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (False, "Unsatisfiable"),
        ({"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}, "#/properties/a: .* anyOf"),
        ({"items": {"not": {}}}, "#/items: .*not"),
    ],
)
def test_messages_about_schemas(schema: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(GrammarSpec("json_schema", json.dumps(schema)))


def test_restrictions_that_leave_nothing_fail_their_request_alone(writer: Writer) -> None:
    good = writer.ask(GrammarSpec("regex", "ab"))
    wrong = writer.ask(GrammarSpec("regex", "ab"), allowed_token_ids=(ord("x"),))
    writer.run()
    end = writer.results[wrong].end
    assert isinstance(end, Failed) and end.status == 400 and "none is left by allowed_token_ids" in end.message
    assert writer.text(good) == b"ab"


def test_requests_that_go_while_their_grammar_is_compiled(start: Start) -> None:
    engine = start()
    compilers = engine.core._grammars._compilers
    gate = threading.Event()
    for _ in range(2):
        compilers.submit(gate.wait)  # both compilers are busy
    left = engine.ask(GrammarSpec("regex", "left"))
    late = engine.ask(GrammarSpec("regex", "late"))
    free = engine.ask(None, max_tokens=5, temperature=0.0)
    engine.until(lambda: engine.results[free].end)
    assert isinstance(engine.results[free].end, Finished)  # steps do not wait for compilers
    engine.core.handle(Abort(request_id=left))
    assert isinstance(engine.results[left].end, Cancelled)
    assert engine.results[late].end is None
    again = engine.ask(GrammarSpec("regex", "left"))
    gate.set()
    engine.run()
    assert (engine.text(late), engine.text(again)) == (b"late", b"left")


def test_compiled_once_for_all_requests(start: Start) -> None:
    engine = start()
    rids = [engine.ask(GrammarSpec("regex", "ab|cd")) for _ in range(3)]
    engine.run()
    compiled = list(engine.core._grammars._cache.values())
    rids.append(engine.ask(GrammarSpec("regex", "ab|cd")))
    request = engine.core.scheduler.request(rids[-1])
    assert request is not None and not request.held  # nothing to wait for
    engine.run()
    assert list(engine.core._grammars._cache.values()) == compiled and len(compiled) == 1
    assert {engine.text(rid) for rid in rids} <= {b"ab", b"cd"}
