"""What agents get: answers of the vendors' own types, calls under their own names, words that clients look for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from anthropic import types as claude
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import Completion, chat
from openai.types import responses as codex
from pydantic import TypeAdapter

from api.text.calls.free_text import NotRegularError, TextReader, parameters_of_text, regex_of_lark, text_in_arguments
from testing.waiting import PATIENCE_S
from tests.api.conftest import Running

IT = {"type": "text", "text": "it"}
TEXT, THOUGHT = "Yes.", "<think>Hm.</think>"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SAID = [TEXT, THOUGHT + TEXT, call("f", a=1), f"{TEXT}{call('f', a=1)}{call('free', input='x y')}", ""]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
FORMS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "/v1/messages": (
        {"max_tokens": 200, "tools": [{"name": "f", "input_schema": {"type": "object"}}]},
        claude.Message,
        claude.RawMessageStreamEvent,
    ),
    "/v1/responses": (
        {"tools": [{"type": "function", **FUNCTION, "strict": None}, {"type": "custom", "name": "free"}]},
        codex.Response,
        codex.ResponseStreamEvent,
    ),
    "/v1/chat/completions": (
        {"tools": [{"type": "function", "function": FUNCTION}]},
        chat.ChatCompletion,
        chat.ChatCompletionChunk,
    ),
    "/v1/completions": ({}, Completion, Completion),
}


def asked(path: str, said: str) -> dict[str, Any]:
    if path == "/v1/completions":
        return {"model": "tiny", "prompt": said or "x"}
    return {
        "model": "say",
        **FORMS[path][0],
        "input" if path == "/v1/responses" else "messages": [{"role": "user", "content": said}],
    }


def nulls(value: Any, place: str = "") -> Iterator[str]:
    """The places of nulls, lists' elements as one."""
    if value is None:
        yield place
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from nulls(inner, f"{place}.{key}")
    for inner in value if isinstance(value, list) else ():
        yield from nulls(inner, f"{place}[]")


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("path", FORMS)
def test_answers_are_of_the_vendors_types(server: Running, path: str, said: str) -> None:
    _, whole, event = FORMS[path]
    answer = server.http.post(path, json=asked(path, said))
    assert answer.status_code == 200, answer.text
    TypeAdapter(whole).validate_json(answer.text, strict=True)
    found = set(nulls(answer.json()))
    lines = server.http.post(path, json={**asked(path, said), "stream": True}).text.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    for each in events:
        if each != "[DONE]" and path != "/v1/completions":  # OpenAI's own have a null that its type lacks
            TypeAdapter(event).validate_json(each, strict=True)
            found |= set(nulls(json.loads(each)))
    if path == "/v1/messages":  # Anthropic leaves out what there is not, and some clients refuse a null
        assert {place.rpartition(".")[2] for place in found} <= {"stop_reason", "stop_sequence"}


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_namespaces_and_of_free_text(server: Running, stream: bool) -> None:
    inner: list[Any] = [{"type": "function", **FUNCTION}, {"type": "custom", "name": "free", "description": "d"}]
    tools: Any = [{"type": "namespace", "name": "n", "description": "d", "tools": inner}, *inner]
    said = call("n__f", a=1) + call("n__free", input='a "b"\n') + call("f") + call("free", input="c")
    answer: Any = server.openai.responses.create(model="say", input=said, tools=tools, stream=stream)
    written: dict[str, str] = {}
    if stream:
        events = list(answer)
        answer = events[-1].response
        for each in events:
            if each.type == "response.custom_tool_call_input.delta":
                written[each.item_id] = written.get(each.item_id, "") + each.delta
            if each.type == "response.custom_tool_call_input.done":
                assert written[each.item_id] == each.input
    made = [
        (item.type, item.name, item.namespace, getattr(item, "input", getattr(item, "arguments", None)))
        for item in answer.output
    ]
    assert made == [
        ("function_call", "f", "n", '{"a": 1}'),
        ("custom_tool_call", "free", "n", 'a "b"\n'),
        ("function_call", "f", None, "{}"),
        ("custom_tool_call", "free", None, "c"),
    ]
    assert len(written) == (2 if stream else 0)
    back = [item.model_dump(exclude_none=True) for item in answer.output]
    results = [{"type": f"{each['type']}_output", "call_id": each["call_id"], "output": "done"} for each in back]
    history = [{"role": "user", "content": "x"}, *back, *results]
    again = server.http.post("/v1/responses", json={"model": "tiny", "input": history})
    assert again.status_code == 200 and "warnings" not in again.headers, again.text
    prompt = str(again.json()["output"][0]["content"][0]["text"])  # the fake answers with the prompt
    assert "n__f" in prompt and prompt.count("done") == 4


def test_free_text_in_a_chat(server: Running) -> None:
    tools: Any = [{"type": "custom", "custom": {"name": "free"}}]
    messages: Any = [{"role": "user", "content": call("free", input="a\n")}]
    whole = server.openai.chat.completions.create(model="say", messages=messages, tools=tools)
    (made,) = whole.choices[0].message.tool_calls or ()
    assert made.type == "custom" and (made.custom.name, made.custom.input) == ("free", "a\n")
    text = ""
    for chunk in server.openai.chat.completions.create(model="say", messages=messages, tools=tools, stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            text += part.custom["input"]  # type: ignore[attr-defined]
    assert text == "a\n"
    later = [*messages, whole.choices[0].message.model_dump(exclude_none=True),
             {"role": "tool", "tool_call_id": made.id, "content": "ok"}]  # fmt: skip
    assert server.openai.chat.completions.create(model="tiny", messages=later, tools=tools).choices


@pytest.mark.parametrize(
    ("choice", "status"),
    [
        ("auto", 200), ("none", 200), ("required", 200), ({"type": "function", "name": "f"}, 200),
        ({"type": "custom", "name": "free"}, 200), ({"type": "web_search"}, 400), ({"type": "mcp"}, 400),
        ({"type": "function", "name": "g"}, 400), ("sometimes", 400),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}, 200),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}, 200),
    ],
)  # fmt: skip
def test_choices(server: Running, choice: Any, status: int) -> None:
    tools = [{"type": "function", **FUNCTION}, {"type": "custom", "name": "free"}, {"type": "web_search"}]
    body = {"model": "tiny", "input": "x", "tools": tools, "tool_choice": choice}
    answer = server.http.post("/v1/responses", json=body)
    assert answer.status_code == status, answer.text
    if isinstance(choice, dict) and choice.get("mode") == "auto":
        assert "free" not in answer.json()["output"][0]["content"][0]["text"]


def test_a_choice_with_no_tool_left(server: Running) -> None:
    for path, body in (
        ("/v1/messages", {"tools": [{"type": "web_search_20250305", "name": "s"}], "tool_choice": {"type": "any"}}),
        ("/v1/responses", {"tools": [{"type": "web_search"}], "tool_choice": "required"}),
    ):
        answer = server.http.post(path, json={**asked(path, "x"), **body})
        assert answer.status_code == 200 and "no tool is left to call" in answer.headers["warnings"]


# ---- Claude Code


def test_the_line_for_the_books_is_no_text(server: Running) -> None:
    def prompt(system: Any) -> str:
        body = {"model": "tiny", "max_tokens": 200, "system": system, "messages": [{"role": "user", "content": "x"}]}
        return str(server.http.post("/v1/messages", json=body).json()["content"][0]["text"])

    line, words = "x-anthropic-billing-header: cc_version=2; cch=ab12c;", "Be kind."
    blocks = [{"type": "text", "text": line}, {"type": "text", "text": words}]
    assert prompt(blocks) == prompt(f"{line}\n{words}") == prompt([{"type": "text", "text": f"{line}\n{words}"}])
    assert prompt(blocks) == prompt(words)
    assert line in prompt(f"{words}\n{line}")  # only at the beginning is it the client's


def test_a_prompt_that_does_not_fit_says_so_as_anthropic_does(server: Running) -> None:
    claude_client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE_S)

    def refused(text: str, max_tokens: int) -> str:
        with pytest.raises(anthropic.BadRequestError) as caught:
            claude_client.messages.create(
                model="tiny", max_tokens=max_tokens, messages=[{"role": "user", "content": text}]
            )
        return str(caught.value.body["error"]["message"])  # type: ignore[index,call-overload]

    for text in ("long " * 500, "long " * 5000):  # after it has been tokenised, and before
        found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", refused(text, 9))
        assert found and int(found[1]) > int(found[2]) == 2048
    sentence = r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+), decrease input length or "
    found = re.fullmatch(sentence + "`max_tokens` and try again", refused("x", 32000))
    assert found and (int(found[2]), int(found[3])) == (32000, 2048)
    claude_client.messages.create(
        model="tiny", max_tokens=2048 - int(found[1]), messages=[{"role": "user", "content": "x"}]
    )
    assert claude_client.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": "x"}])


def test_tools_that_come_and_go_in_messages(server: Running) -> None:
    added = {"type": "tool_definition", "definition": {"name": "later", "input_schema": {"type": "object"}}}
    blocks = [
        {"type": "tool_addition", "tool": added},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}},
        {"type": "text", "text": "look"},
    ]
    body = {**asked("/v1/messages", "x"), "model": "tiny", "messages": [{"role": "user", "content": blocks}]}
    answer = server.http.post("/v1/messages", json={**body, "max_tokens": 900})
    text = answer.json()["content"][0]["text"]
    assert '"later"' in text and '"f"' not in text and text.endswith("look\nassistant\n")


def test_documents_and_results_are_read(server: Running) -> None:
    text = {"type": "text", "media_type": "text/plain", "data": "the words"}
    document = {"type": "document", "title": "A title", "source": text}
    found = {
        "type": "search_result",
        "title": "Found",
        "source": "http://x",
        "content": [{"type": "text", "text": "it"}],
    }
    blocks = [document, found, {"type": "text", "text": "what?"}]
    body = {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": blocks}]}
    answer = server.http.post("/v1/messages", json=body)
    said = answer.json()["content"][0]["text"]
    assert "the words" in said and "A title" in said and "http://x" in said and "warnings" not in answer.headers
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="}}
    body["messages"] = [{"role": "user", "content": [pdf]}]
    assert server.http.post("/v1/messages", json=body).status_code == 400


# ---- forced calls

SOUND = st.sampled_from([{"type": "integer"}, {"type": "string", "maxLength": 3}, {"enum": ["a", "b"]}, {"const": 1}])
ODD = st.sampled_from(
    [{"type": "string", "pattern": "^(?!a)b$"}, {"not": {}}, {"type": "string", "pattern": "(?<=x)y"},
     {"type": "array", "items": {"type": "string", "pattern": "(?=a)"}, "uniqueItems": True},
     {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}, {"$ref": "#/$defs/odd"}]
)  # fmt: skip


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from("abc"), SOUND), st.dictionaries(st.sampled_from("xyz"), ODD, min_size=1))
def test_what_no_grammar_holds_is_left_out(server: Running, sound: dict[str, Any], odd: dict[str, Any]) -> None:
    schema = {
        "type": "object",
        "properties": sound | odd,
        "required": [*sound],
        "$defs": {"odd": {"type": "string", "pattern": "(?=a)b"}},
    }

    def answer(**more: Any) -> Any:
        function = {"name": "f", "parameters": schema, **more}
        tools = [{"type": "function", "function": function}]
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": tools}
        return server.http.post("/v1/chat/completions", json={**body, "tool_choice": "required", "max_tokens": 5})

    assert (taken := answer()).status_code == 200, taken.text
    grammar = server.received("Submit")[-1]["grammar"]["text"]
    assert all(json.dumps(each) in grammar for each in sound.values())  # what can be held is
    assert "of f is not enforced" in taken.headers["warnings"]
    refused = answer(strict=True)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "invalid_grammar"


# ---- free text


@given(st.text(), st.lists(st.integers(1, 5)), st.booleans())
def test_free_text_is_read_as_it_comes(text: str, cuts: list[int], ascii_: bool) -> None:
    text = text.encode(errors="replace").decode()
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_)
    assert text_in_arguments(arguments) == text
    reader, read, at = TextReader(), "", 0
    for cut in [*cuts, len(arguments)]:
        read += reader.push(arguments[at : at + cut])
        at += cut
        assert text.startswith(read)
    assert read == text


_WORDS = st.text("ab*. ", min_size=1, max_size=4)
_LARK = st.recursive(
    _WORDS.map(lambda word: (json.dumps(word), re.escape(word)))
    | st.just(("/[a-c]+/", "[a-c]+"))
    | st.just(("LF", "\n")),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda two: (f"({two[0][0]} {two[1][0]})", f"(?:{two[0][1]}{two[1][1]})")),
        st.tuples(inner, inner).map(lambda two: (f"({two[0][0]} | {two[1][0]})", f"(?:{two[0][1]}|{two[1][1]})")),
        st.tuples(inner, st.sampled_from("?*+")).map(
            lambda one: (f"({one[0][0]}){one[1]}", f"(?:{one[0][1]}){one[1]}")
        ),
        inner.map(lambda one: (f"[{one[0]}]", f"(?:{one[1]})?")),
    ),
    max_leaves=6,
)


@given(st.lists(_LARK, min_size=1, max_size=3), st.text("abc*. \n", max_size=6))
def test_regular_lark_grammars_are_expressions(rules: list[tuple[str, str]], text: str) -> None:
    names = [f"r{i}" for i in range(len(rules))]
    lines = ["start: " + " ".join(names), "%import common.LF", "// a note"]
    grammar = "\n".join([*lines, *(f"{name}: {rule[0]} -> alias" for name, rule in zip(names, rules, strict=True))])
    expected = "".join(f"(?:{rule[1]})" for rule in rules)
    assert bool(re.fullmatch(regex_of_lark(grammar), text)) == bool(re.fullmatch(expected, text))


@pytest.mark.parametrize(
    "grammar",
    [
        "", "start: start", "start: a\na: b\nb: a", "start: /x", "start: %regex", 'x: "a"', "start: nowhere",
        "%import python.X\nstart: X", 'start: "\\q"',
    ],
)  # fmt: skip
def test_other_grammars_are_noted(server: Running, grammar: str) -> None:
    with pytest.raises(NotRegularError):
        regex_of_lark(grammar)
    tool = {"type": "custom", "name": "free", "format": {"type": "grammar", "syntax": "lark", "definition": grammar}}
    answer = server.http.post("/v1/responses", json={"model": "tiny", "input": "x", "tools": [tool]})
    assert answer.status_code == 200 and "free is not held to its grammar" in answer.headers["warnings"]


def test_a_grammar_of_free_text_is_enforced(server: Running) -> None:
    for syntax, definition in (("regex", "[0-9]{3}"), ("lark", "start: /[0-9]/ /[0-9]{2}/")):
        form = {"type": "grammar", "syntax": syntax, "definition": definition}
        body = {"model": "tiny", "input": "x", "tools": [{"type": "custom", "name": "free", "format": form}]}
        for choice in ("auto", "required"):
            answer = server.http.post("/v1/responses", json={**body, "tool_choice": choice})
            assert answer.status_code == 200 and "warnings" not in answer.headers, answer.text
            assert "[0-9]" in server.received("Submit")[-1]["grammar"]["text"]
    wrong = {"type": "grammar", "syntax": "regex", "definition": "(?=a)b"}
    body = {"model": "tiny", "input": "x", "tools": [{"type": "custom", "name": "free", "format": wrong}]}
    for choice in ("auto", "required"):
        answer = server.http.post("/v1/responses", json={**body, "tool_choice": choice})
        assert answer.status_code == 200 and "not held to its grammar" in answer.headers["warnings"]
    assert parameters_of_text("a")["properties"]["input"]["pattern"] == "^(?:a)$"


def test_clients_see_a_refusal_of_an_image_in_their_own_words(server: Running) -> None:
    part: Any = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        server.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": part}])
