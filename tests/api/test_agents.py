"""Nothing in a history or in a list of offers ends a session: the vendors' own types, walked."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from anthropic import types as claude
from anthropic.types import beta as claude_beta
from anthropic.types import tool_result_block_param
from anthropic.types.beta import beta_tool_result_block_param
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import chat
from openai.types import responses as codex
from openai.types.responses import response_create_params

from api.dialects.responses.requests import Included
from api.text import kinds
from api.text.kinds import Fate, Kinds
from tests.api.conftest import Running
from tests.api.vendor_types import examples, fields, members, types_of, written

RESULT_PARTS = (tool_result_block_param.Content, beta_tool_result_block_param.Content)
BLOCKS = (claude.ContentBlockParam, claude_beta.BetaContentBlockParam, *RESULT_PARTS)
CHOICE = fields(response_create_params.ResponseCreateParamsBase)["tool_choice"]
PUBLISHED: list[tuple[Kinds, tuple[Any, ...]]] = [
    (kinds.BLOCKS, BLOCKS),
    (kinds.DOCUMENTS, (fields(claude_beta.BetaRequestDocumentBlockParam)["source"],)),
    (kinds.ANTHROPIC_TOOLS, (claude.ToolUnionParam, claude_beta.BetaToolUnionParam)),
    (kinds.ANTHROPIC_CHOICES, (claude.ToolChoiceParam, claude_beta.BetaToolChoiceParam)),
    (kinds.ITEMS, (codex.ResponseInputItemParam, codex.ResponseOutputItem)),
    (kinds.PARTS, (codex.ResponseInputContentParam, fields(codex.ResponseOutputMessage)["content"])),
    (kinds.TOOLS, (codex.ToolParam,)),
    (kinds.CHOICES, (CHOICE,)),
    (kinds.CHAT_PARTS, (chat.ChatCompletionContentPartParam,)),
    (kinds.CHAT_CALLS, (chat.ChatCompletionMessageToolCallUnionParam,)),
    (kinds.CHAT_TOOLS, (chat.ChatCompletionToolUnionParam,)),
    (kinds.CHAT_CHOICES, (chat.ChatCompletionToolChoiceOptionParam,)),
]
USER = {"role": "user", "content": "look"}


@pytest.mark.parametrize(("table", "unions"), PUBLISHED, ids=lambda each: getattr(each, "title", ""))
def test_the_table_has_every_published_type(table: Kinds, unions: tuple[Any, ...]) -> None:
    published = frozenset().union(*map(types_of, unions))
    assert len(published) > 1 and published <= set(table.rows)


def test_the_walk_sees_each_member() -> None:
    """A union whose members the walk cannot name would pass any table."""
    for _, unions in PUBLISHED:
        for member in (each for union in unions for each in members(union) if isinstance(each, type)):
            assert written(member), member
    assert {kind.name for table in kinds.TABLES for kind in table.rows.values() if not kind.note} == set()
    assert types_of(codex.ResponseIncludable) <= set(Included.__args__)


def post(server: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    limit = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
    return server.http.post(path, json={"model": "tiny", limit: 3, **body})


def warned(response: httpx.Response, kind: str) -> bool:
    return repr(kind) in response.headers.get("warnings", "")


@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_history_of_any_blocks_is_answered(server: Running, data: st.DataObject) -> None:
    block = data.draw(examples(data.draw(st.sampled_from(list(members(claude_beta.BetaContentBlockParam))))))
    result = data.draw(examples(data.draw(st.sampled_from([m for u in RESULT_PARTS for m in members(u)]))))
    if not isinstance(block, dict):  # a model of an answer's block; its own type stands beside it
        return
    results = {"type": "tool_result", "tool_use_id": "t", "content": [result]}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    role = data.draw(st.sampled_from(["user", "assistant"]))
    history = [USER, {"role": role, "content": [block]}, {"role": "assistant", "content": [call]}]
    tail = data.draw(st.sampled_from([[], [{"role": "assistant", "content": "ok"}, USER]]))
    body = {"messages": [*history, {"role": "user", "content": [results]}, *tail]}
    answer = post(server, "/v1/messages", body)
    assert answer.status_code == 200 or "prompt is too long" in answer.text, answer.text
    fates = {each["type"]: kinds.BLOCKS.rows[each["type"]].fate for each in (block, result)}
    for kind, fate in fates.items():
        if answer.status_code == 200 and fate is Fate.LEFT_OUT:
            assert warned(answer, kind)


@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_history_of_any_items_is_answered(server: Running, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([m for m in members(codex.ResponseInputItemParam) if isinstance(m, type)]))
    item = data.draw(examples(kind))
    tail = [{"role": "assistant", "content": "ok"}, USER]
    answer = post(server, "/v1/responses", {"input": [USER, item, *tail]})
    assert answer.status_code == 200 or "maximum context" in answer.text, answer.text
    of = item.get("type") or ("message" if "role" in item else "item_reference")
    if answer.status_code == 200 and kinds.ITEMS.fate(of) is Fate.LEFT_OUT:
        assert warned(answer, of)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_history_of_any_parts_is_answered(server: Running, data: st.DataObject) -> None:
    part = data.draw(examples(chat.ChatCompletionContentPartParam))
    shown = {"role": "user", "content": [part]}
    answer = post(server, "/v1/chat/completions", {"messages": [shown, {"role": "assistant", "content": "ok"}, USER]})
    assert answer.status_code == 200, answer.text
    if part["type"] != "text":
        assert warned(answer, part["type"])
        assert post(server, "/v1/chat/completions", {"messages": [shown]}).status_code == 400


ODD = st.sampled_from([None, 5, "x", "tool", [], {}, [None], ["x"], {"a": 1}])


@st.composite
def broken(draw: st.DrawFn, whole: Any) -> Any:
    """`whole` with one field, at any depth, left out or of another type; `type` stays. A role may be any name."""
    if isinstance(whole, list) and whole and draw(st.booleans()):
        return [*whole[:-1], draw(st.one_of(ODD, broken(whole[-1])))]
    keys = sorted(whole.keys() - {"type"}) if isinstance(whole, dict) else []
    if not keys:
        return draw(ODD)
    key = draw(st.sampled_from(keys))
    change = draw(st.sampled_from(["without", "odd", "within"]))
    if change == "without":
        return {name: value for name, value in whole.items() if name != key}
    return {**whole, key: draw(ODD if change == "odd" else broken(whole[key]))}


_CALL = {"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_BLOCKS: list[Any] = [
    {"type": "text", "text": "a"},
    {"type": "thinking", "thinking": "a", "signature": "b"},
    {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a"}]},
    {"type": "document", "source": {"type": "text", "data": "a"}},
]
FORMS: dict[str, list[Any]] = {
    "/v1/messages": [{"role": role, "content": [block]} for role in ("user", "assistant") for block in _BLOCKS],
    "/v1/responses": [
        {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
        {"type": "function_call", "call_id": "t", "name": "f", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "t", "name": "f", "input": "a"},
        {"type": "function_call_output", "call_id": "t", "output": [{"type": "input_text", "text": "a"}]},
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "f"}]},
    ],
    "/v1/chat/completions": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "a"}], "reasoning_content": "b"},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "t", "content": [{"type": "text", "text": "a"}]},
    ],
    "/api/chat": [
        {"role": "assistant", "content": "a", "thinking": "b", "tool_calls": [{"function": _CALL["function"]}]},
        {"role": "tool", "tool_name": "f", "content": "a"},
    ],
}


@pytest.mark.parametrize("path", FORMS)
def test_a_history_of_any_form_is_answered(server: Running, path: str) -> None:
    """What has not the form of its kind is left out, and said to be; where it is newly asked for, a 400 names it."""
    name = "input" if path == "/v1/responses" else "messages"

    @settings(max_examples=100, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(FORMS[path]).flatmap(broken))
    def check(odd: Any) -> None:
        if not isinstance(odd, dict):
            return
        answer = post(server, path, {name: [USER, odd, {"role": "assistant", "content": "ok"}, USER]})
        assert answer.status_code == 200, (odd, answer.text)

    check()
    if path == "/v1/chat/completions":
        for odd, place in (
            ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[].tool_calls[]: left out"),
            ({"role": "tool", "content": "x", "tool_call_id": 3}, "messages[].tool_call_id"),
        ):
            answer = post(server, path, {name: [USER, odd, {"role": "assistant", "content": "ok"}, USER]})
            assert answer.status_code == 200 and place in answer.headers["warnings"], answer.headers
    for role in (None, 5, "critic", {}):
        answer = post(server, path, {name: [USER, {"role": role, "content": "a"}, USER]})
        assert answer.status_code == 200 and ".role: " in answer.headers["warnings"], answer.headers
        refused = post(server, path, {name: [USER, {"role": role, "content": "a"}]})
        assert refused.status_code == 400 and f"{name}[1].role" in refused.text
    strings = post(server, path, {name: [{"role": "user", "content": ["look", " here"]}]})
    assert strings.status_code == 200, strings.text
    for content in (*(() if path == "/api/chat" else (None,)), 5, {"a": 1}, [None], [{"type": "text"}]):
        refused = post(server, path, {name: [USER, {"role": "user", "content": content}]})
        assert refused.status_code == 400 and f"{name}[1].content" in refused.text, (content, refused.text)


@pytest.mark.parametrize("path", FORMS)
def test_what_is_no_message_is_left_out(server: Running, path: str) -> None:
    """At the end it is a 400."""
    name = "input" if path == "/v1/responses" else "messages"
    for odd in (None, 5, "x", [], [{}], True):
        for history in ([odd, USER], [USER, odd, {"role": "assistant", "content": "ok"}, USER]):
            answer = post(server, path, {name: history})
            assert answer.status_code == 200 and f"{name}[]: left out" in answer.headers["warnings"], answer.text
        refused = post(server, path, {name: [USER, odd]})
        assert refused.status_code == 400 and "[1] is not an object" in refused.text


SCHEMAS = [{"type": "object", "properties": {name: {"type": "string"}}} for name in ("old", "new")]


@pytest.mark.parametrize("path", FORMS)
def test_the_last_of_tools_with_one_name_is_offered(server: Running, path: str) -> None:
    made: dict[str, list[dict[str, Any]]] = {
        "/v1/messages": [{"name": "f", "input_schema": schema} for schema in SCHEMAS],
        "/v1/responses": [{"type": "function", "name": "f", "parameters": schema} for schema in SCHEMAS],
    }
    chats = [{"type": "function", "function": {"name": "f", "parameters": schema}} for schema in SCHEMAS]
    asked = {"input" if path == "/v1/responses" else "messages": [USER], "max_tokens": 500, "stream": False}
    if path == "/v1/responses":
        asked["max_output_tokens"] = asked.pop("max_tokens")
    tools = made.get(path, chats)
    alone, both = (post(server, path, {**asked, "tools": each}) for each in (tools[1:], tools))
    assert both.status_code == 200 and "'f' is defined again" in both.headers["warnings"], both.text
    said = [re.sub('resp_[^"]*|msg_[^"]*|chatcmpl-[^"]*', "", each.text) for each in (alone, both)]
    assert '\\"new' in said[1] and '\\"old' not in said[1]  # the fake answers with the prompt


BAD_TOOLS: list[dict[str, Any]] = [
    {"name": "a b"}, {"name": "ü"}, {"name": "g" * 200}, {"name": "g", "parameters": []}, {"name": 5}, {},
    {"name": "g", "parameters": {"type": "string"}}, {"name": "g", "description": 5},
    {"name": "g", "parameters": {"type": "object", "properties": []}}, {"name": "g", "strict": "no"},
]  # fmt: skip


@pytest.mark.parametrize("tool", BAD_TOOLS, ids=str)
def test_definitions_in_a_history_that_could_not_be_offered(server: Running, tool: dict[str, Any]) -> None:
    item = {"type": "additional_tools", "tools": [{"type": "function", **tool}]}
    inner = {"type": "additional_tools", "tools": [{"type": "namespace", "name": "n", "tools": item["tools"]}]}
    for odd in (item, inner):
        answer = post(server, "/v1/responses", {"input": [odd, USER]})
        assert answer.status_code == 200 and "left out" in answer.headers["warnings"], answer.text
    definition = {("input_schema" if key == "parameters" else key): value for key, value in tool.items()}
    added = {"role": "user", "content": [{"type": "tool_addition", "tool": {"definition": definition}}]}
    history = [USER, added, {"role": "assistant", "content": "ok"}, USER]
    answer = post(server, "/v1/messages", {"messages": history})
    assert answer.status_code == 200 and "left out" in answer.headers["warnings"], answer.text


@pytest.mark.parametrize("tool", [{"google_search": {}}, {"code_execution": {}}])
def test_offers_of_other_vendors_are_left_out(server: Running, tool: dict[str, Any]) -> None:
    answer = post(server, "/v1/chat/completions", {"messages": [USER], "tools": [tool]})
    assert answer.status_code == 200 and warned(answer, next(iter(tool)))


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
OTHER_FORMS: list[dict[str, Any]] = [
    {"type": "function", "name": "f", "parameters": SCHEMA},
    {"name": "f", "parameters": SCHEMA, "cache_control": {"type": "ephemeral"}},
    {"name": "f", "input_schema": SCHEMA},
    {"type": "custom", "name": "f", "input_schema": SCHEMA, "description": "d"},
    {"type": "custom", "name": "f", "description": "d", "format": {"type": "text"}},
    {"type": "function", "function": {"name": "f", "parameters": {**SCHEMA, "type": "OBJECT"}}},
    {"type": "function", "function": {"name": "f", "parameters": {**SCHEMA, "type": ["object", "null"]}}},
]


@pytest.mark.parametrize("tool", OTHER_FORMS, ids=str)
def test_tools_in_the_form_of_other_vendors_are_offered(server: Running, tool: dict[str, Any]) -> None:
    """Editors send to a chat what they send to the model's vendor; the calls are a chat's."""
    choices: list[Any] = [{"type": "function", "function": {"name": "f"}}, {"type": "tool", "name": "f"}]
    for choice in (*choices, {"type": "function", "name": "f"}):
        body = {"messages": [USER], "tools": [tool], "tool_choice": choice, "max_tokens": 30}
        answer = server.http.post("/v1/chat/completions", json={"model": "tiny", **body})
        assert answer.status_code == 200, answer.text
        assert not warned(answer, "f")
    other = {"messages": [USER], "tools": [tool], "tool_choice": {"type": "tool", "name": "g"}}
    assert "no tool 'g'" in post(server, "/v1/chat/completions", other).text


OFFERS = [
    ("/v1/messages", kinds.ANTHROPIC_TOOLS, claude_beta.BetaToolUnionParam, {"messages": [USER]}),
    ("/v1/responses", kinds.TOOLS, codex.ToolParam, {"input": "look"}),
    ("/v1/chat/completions", kinds.CHAT_TOOLS, chat.ChatCompletionToolUnionParam, {"messages": [USER]}),
]


@pytest.mark.parametrize(("path", "table", "union", "asked"), OFFERS, ids=lambda each: str(each)[:22])
def test_any_offers_are_answered(server: Running, path: str, table: Kinds, union: Any, asked: dict[str, Any]) -> None:
    own = {
        "/v1/messages": {"name": "Read", "input_schema": {"type": "object"}},
        "/v1/responses": {"type": "function", "name": "Read", "parameters": {"type": "object"}},
        "/v1/chat/completions": {"type": "function", "function": {"name": "Read"}},
    }[path]

    @settings(max_examples=80, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from([each for each in members(union) if isinstance(each, type)]).flatmap(examples))
    def check(tool: dict[str, Any]) -> None:
        kind = tool.get("type") or "custom"
        answer = post(server, path, {**asked, "tools": [own, tool]})
        if table.fate(kind) is Fate.LEFT_OUT:
            assert answer.status_code == 200 and warned(answer, kind), answer.text
        else:
            assert answer.status_code == 200 or re.search("too long|maximum context", answer.text), answer.text

    check()


@pytest.mark.parametrize("kind", ["web_search_20991231", "novel"])
def test_kinds_that_nobody_knows_yet(server: Running, kind: str) -> None:
    """Left out of a history and of offers; a 400 where a user newly asks."""
    block = {"type": kind, "name": "x"}
    later = [{"role": "assistant", "content": "ok"}, USER]
    shown = {"role": "user", "content": [block]}
    for path, tools, history, new in (
        ("/v1/messages", [block], [shown, *later], [shown]),
        ("/v1/responses", [block], [USER, block, *later], [shown]),
        ("/v1/chat/completions", [block], [shown, *later], [shown]),
    ):
        name = "input" if path == "/v1/responses" else "messages"
        answer = post(server, path, {name: history, "tools": tools})
        assert answer.status_code == 200 and warned(answer, kind), answer.text
        refused = post(server, path, {name: new})
        assert refused.status_code == 400 and kind in refused.text


IMAGES = {
    "/v1/messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
    "/v1/responses": {"type": "input_image", "image_url": "data:image/png;base64,aGk="},
    "/v1/chat/completions": {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
}


@pytest.mark.parametrize("path", IMAGES)
def test_an_image_is_refused_once(server: Running, path: str) -> None:
    """Where it is newly asked for; it does not end the session that goes on with it in the history."""
    name = "input" if path == "/v1/responses" else "messages"
    shown = {"role": "user", "content": [IMAGES[path]]}
    refused = post(server, path, {name: [shown]})
    assert refused.status_code == 400 and IMAGES[path]["type"] in refused.text
    for tail in ([USER], [{"role": "assistant", "content": "no"}, USER]):
        answer = post(server, path, {name: [shown, *tail]})
        assert answer.status_code == 200 and warned(answer, IMAGES[path]["type"]), answer.text
    prompt = json.dumps(server.http.post("/v1/chat/completions", json={"model": "tiny", "messages": [
        {"role": "user", "content": [IMAGES["/v1/chat/completions"]]}, USER]}).json())  # fmt: skip
    assert "[image: this model reads text only]" in prompt
