"""Other forms of a chat, spoken by their own clients; and the blocks that all of them write."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import httpx2
import ollama
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.bodies.parsing import Notes, parse
from api.dialects.anthropic import requests as messages_form
from api.dialects.anthropic.requests import MessagesRequest
from api.dialects.anthropic.routes import MessagesFormatter
from api.dialects.common.blocks import BlockKind, Blocks, Change
from api.dialects.ollama import requests as ollama_form
from api.dialects.ollama.requests import OllamaChatRequest
from api.dialects.responses.routes import ResponsesFormatter
from api.http.answers.generation import Update
from api.text.calls.definitions import MAX_TOOLS
from api.text.deltas import Reasoning, Text, ToolArguments, ToolStart
from testing.waiting import PATIENCE_S
from tests.api.conftest import Running

USER: Any = [{"role": "user", "content": "hello wörld"}]
ECHO = "user\nhello wörld\nassistant\n"  # the fake answers with the prompt


@pytest.fixture(scope="module")
def claude(server: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def llama(server: Running) -> ollama.Client:
    return ollama.Client(host=server.url, timeout=PATIENCE_S)


# ---- Anthropic


def test_a_message(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(model="tiny", max_tokens=200, system="be kind", messages=USER)
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == "system\nbe kind\n" + ECHO
    assert (answer.type, answer.role, answer.stop_reason, answer.model) == ("message", "assistant", "end_turn", "tiny")
    usage = answer.usage
    asked = claude.messages.count_tokens(model="tiny", system="be kind", messages=USER).input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == asked == usage.output_tokens - 1


def test_a_streamed_message_is_the_same(claude: anthropic.Anthropic) -> None:
    blocks = [{"role": "user", "content": [{"type": "text", "text": "hello ", "cache_control": {"type": "ephemeral"}},
                                           {"type": "text", "text": "wörld"}]}]  # fmt: skip
    with claude.messages.stream(model="reverse", max_tokens=200, messages=blocks) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    whole = claude.messages.create(model="reverse", max_tokens=200, messages=USER)
    assert final.content[0].text == whole.content[0].text and final.usage.output_tokens == whole.usage.output_tokens
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1


def test_why_a_message_ended(claude: anthropic.Anthropic) -> None:
    short = claude.messages.create(model="tiny", max_tokens=3, messages=USER)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)
    cut = claude.messages.create(model="tiny", max_tokens=200, messages=USER, stop_sequences=["zz", "wör"])
    assert (cut.stop_reason, cut.stop_sequence, cut.content[0].text) == ("stop_sequence", "wör", "user\nhello ")


def test_mistakes_have_anthropics_form(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model="tiny", max_tokens=0, messages=USER)
    assert caught.value.body["type"] == "error" and "max_tokens" in caught.value.body["error"]["message"]  # type: ignore[index,call-overload]
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="nope", max_tokens=1, messages=USER)
    image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\]: 'image'"):
        claude.messages.create(model="tiny", max_tokens=1, messages=image)  # type: ignore[arg-type]
    with pytest.raises(anthropic.InternalServerError, match="a fault of the fake"):
        claude.messages.create(model="fail", max_tokens=9, messages=USER)
    with (
        pytest.raises(anthropic.APIError, match="a fault of the fake"),
        claude.messages.stream(model="fail", max_tokens=9, messages=USER) as stream,
    ):
        stream.get_final_message()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions", "/api/chat"])
def test_many_tools(server: Running, path: str) -> None:
    """As many as the table says, in every form: clients bring those of all their plug-ins."""

    def answer(count: int) -> httpx.Response:
        wanted = {"name": "f", "description": "d"}
        schema = {"type": "object", "properties": {}}
        kinds = {
            "/v1/messages": wanted | {"input_schema": schema},
            "/v1/responses": wanted | {"type": "function", "parameters": schema},
        }
        tool = kinds.get(path, {"type": "function", "function": wanted | {"parameters": schema}})
        tools = [json.loads(json.dumps(tool).replace('"f"', f'"f{i}"')) for i in range(count)]
        asked = {"input": "x"} if path == "/v1/responses" else {"messages": USER, "max_tokens": 4}
        return server.http.post(path, json={"model": "tiny", "stream": False, "tools": tools} | asked)

    too_long = "prompt is too long" if path == "/v1/messages" else "maximum context length"
    assert too_long in answer(MAX_TOOLS).text  # for the tiny model; the tools themselves are taken
    refused = answer(MAX_TOOLS + 1)
    assert refused.status_code == 400 and "tools" in refused.text and str(MAX_TOOLS) in refused.text


def test_calls_and_results_become_messages() -> None:
    said = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Köln"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "and?"}]},
    ]  # fmt: skip
    tools = [{"name": "weather", "description": "d", "input_schema": {"type": "object"}}]
    asked = {"messages": said, "tools": tools, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    chat = messages_form.chat_of(parse(MessagesRequest, json.dumps(asked).encode()), Notes())
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    assert chat["messages"] == [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "t1", "content": "rain"},
        {"role": "user", "content": "and?"},
    ]
    function = {"name": "weather", "description": "d", "parameters": {"type": "object"}}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == ("required", False)


# ---- Ollama


def test_ollamas_chat(llama: ollama.Client) -> None:
    whole = llama.chat("tiny:latest", USER)
    assert (whole.message.content, whole.done, whole.done_reason) == (ECHO, True, "stop")
    assert whole.eval_count == (whole.prompt_eval_count or 0) + 1
    parts = list(llama.chat("tiny", USER, stream=True))
    assert "".join(part.message.content or "" for part in parts) == ECHO
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    short = llama.chat("tiny", USER, options={"num_predict": 3, "num_ctx": 9, "repeat_penalty": 1.1, "stop": ["z"]})
    assert (short.eval_count, short.done_reason) == (3, "length")


def test_ollamas_generate(llama: ollama.Client) -> None:
    assert llama.generate("tiny", "hello wörld").response == ECHO
    assert llama.generate("tiny", "hello", raw=True, options={"num_predict": 99}).response == "hello"
    assert "".join(part.response for part in llama.generate("reverse", "abc", raw=True, stream=True)) == "cba"


def test_ollamas_lists(llama: ollama.Client, server: Running) -> None:
    assert {"tiny", "reverse"} <= {model.model for model in llama.list().models}
    shown = llama.show("reverse:latest")
    assert shown.modelinfo and shown.capabilities == ["completion"]
    assert server.http.get("/api/version").json()["version"]
    for call in (lambda: llama.show("nope"), lambda: llama.chat("nope", USER)):
        with pytest.raises(ollama.ResponseError, match="does not exist") as caught:
            call()
        assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="images"):
        llama.chat("tiny", [{"role": "user", "content": "x", "images": ["aGk="]}])


def test_ollamas_calls_get_ids() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    said = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call, {"function": {"name": "g", "arguments": {}}}]},
        {"role": "tool", "content": "2", "tool_name": "g"},
        {"role": "tool", "content": "1"},
    ]
    chat = ollama_form.chat_of(parse(OllamaChatRequest, json.dumps({"messages": said}).encode()), Notes())
    assert [c["id"] for c in chat["messages"][1]["tool_calls"]] == ["call_1", "call_2"]
    assert [m["tool_call_id"] for m in chat["messages"][2:]] == ["call_2", "call_1"]
    orphan = {"role": "tool", "content": "1"}
    chat = ollama_form.chat_of(parse(OllamaChatRequest, json.dumps({"messages": [orphan]}).encode()), Notes())
    assert chat["messages"] == [orphan]


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat"])
@pytest.mark.parametrize("content", ["It is", "m", "e "])
def test_the_answer_goes_on_with_an_assistants_text(server: Running, path: str, content: str) -> None:
    def answer(more: list[Any]) -> Any:
        body = {"model": "tiny", "stream": False, "max_tokens": 200, "messages": [*USER, *more]}
        return server.http.post(path, json=body if path == "/v1/messages" else {**body, "options": {}}).json()

    def text(said: Any) -> str:  # the fake answers with the prompt
        return str(said["content"][0]["text"] if path == "/v1/messages" else said["message"]["content"])

    assert text(answer([])) == ECHO
    assert text(answer([{"role": "assistant", "content": content}])) == ECHO + content


# ---- what all of them write

CALL = st.builds(lambda parts: ("call", parts), st.lists(st.text(max_size=3), max_size=3))
RUN = st.tuples(st.sampled_from(["text", "reasoning"]), st.lists(st.text(min_size=1, max_size=3), min_size=1))


@given(st.lists(RUN | CALL, max_size=6))
def test_blocks_open_and_close_in_order(runs: list[tuple[str, list[str]]]) -> None:
    deltas: list[Any] = []
    for number, (kind, parts) in enumerate(runs):
        if kind == "call":
            deltas += [ToolStart(number, f"c{number}", "f"), *(ToolArguments(number, part) for part in parts)]
        else:
            deltas += [(Text if kind == "text" else Reasoning)(part) for part in parts]
    blocks = Blocks()
    changes = [*blocks.push(deltas), *blocks.finish()]
    open_block, texts = None, {}
    for what, block, text in changes:
        if what is Change.START:
            assert open_block is None and block.index == len(texts)
            open_block, texts[block.index] = block, ""
        elif what is Change.MORE:
            assert open_block is block and text
            texts[block.index] += text
        else:
            assert open_block is block
            open_block = None
    assert open_block is None
    assert [texts[block.index] for block in blocks.all] == [block.text for block in blocks.all]
    for kind, sort in (("text", BlockKind.TEXT), ("reasoning", BlockKind.REASONING), ("call", BlockKind.CALL)):
        expected = "".join(part for name, parts in runs if name == kind for part in parts)
        assert "".join(block.text for block in blocks.all if block.kind is sort) == expected
    assert len(blocks.calls) == sum(kind == "call" for kind, _ in runs)


class _Answers:
    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": 1,
            "completion_tokens": 2,
            "total_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 1},
        }


def test_a_streamed_call_is_what_the_clients_put_together() -> None:
    deltas = [Reasoning("hm"), Text("a"), ToolStart(0, "c0", "f"), ToolArguments(0, '{"x":'), ToolArguments(0, " 1}")]
    last = Update(deltas, finish_reason="tool_calls")

    def served(formatter: Any, library: Any) -> Any:
        content = formatter.begin() + formatter.update(0, last) + formatter.end()

        def answer(request: Any) -> Any:
            return library.Response(200, content=content, headers={"content-type": "text/event-stream"})

        return library.Client(transport=library.MockTransport(answer))

    formatter = MessagesFormatter("msg_1", "m", _Answers())  # type: ignore[arg-type]
    claude = anthropic.Anthropic(api_key="x", http_client=served(formatter, httpx2))
    with claude.messages.stream(model="m", max_tokens=9, messages=USER) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[2].input == {"x": 1} and message.stop_reason == "tool_use"  # type: ignore[union-attr]
    kept: list[Any] = []
    head = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m"}
    response = ResponsesFormatter(head, _Answers(), None, lambda *given: kept.append(given))  # type: ignore[arg-type]
    client = openai.OpenAI(api_key="x", http_client=served(response, httpx))
    *_, end = client.responses.create(model="m", input="x", stream=True)
    assert [item.type for item in end.response.output] == ["reasoning", "message", "function_call"]  # type: ignore[union-attr]
    assert end.response.output[2].arguments == '{"x": 1}'  # type: ignore[union-attr]
    assert kept[0][1]["tool_calls"][0]["id"] == "c0" and kept[0][1]["reasoning_content"] == "hm"


def test_small_endpoints(server: Running) -> None:
    assert server.http.get("/ping").status_code == server.http.post("/ping").status_code == 200
    assert server.http.get("/load").json()["server_load"] >= 0
    info = server.http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>" and "im_start" in info["chat_template"] and info["vocab_size"] > 256
