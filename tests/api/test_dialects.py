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

from api.errors import ApiError
from api.http.answers.generation import Update
from api.http.answers.stored import ResponseStore, Stored
from api.http.bodies.dialects import MessagesRequest, OllamaChatRequest, ResponsesRequest
from api.http.dialects import anthropic as messages_form
from api.http.dialects import ollama as ollama_form
from api.http.dialects import responses as responses_form
from api.http.dialects.blocks import Blocks, Change, Kind
from api.http.dialects.responses import ResponsesFront
from api.http.fields.parsing import parse
from api.text.calls.definitions import MAX_TOOLS
from api.text.deltas import Reasoning, Text, ToolArguments, ToolStart
from testing.waiting import PATIENCE_S
from tests.api.conftest import Running, serving

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

    assert "maximum context length" in answer(MAX_TOOLS).text  # the tiny model's; the tools themselves are taken
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
    chat = messages_form.chat_of(parse(MessagesRequest, json.dumps(asked).encode()))
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
    chat = ollama_form.chat_of(parse(OllamaChatRequest, json.dumps({"messages": said}).encode()))
    assert [c["id"] for c in chat["messages"][1]["tool_calls"]] == ["call_1", "call_2"]
    assert [m["tool_call_id"] for m in chat["messages"][2:]] == ["call_2", "call_1"]
    orphan = json.dumps({"messages": [{"role": "tool", "content": "1"}]}).encode()
    with pytest.raises(ApiError, match="no call"):
        ollama_form.chat_of(parse(OllamaChatRequest, orphan))


# ---- Responses


def test_a_response_and_one_that_goes_on(server: Running) -> None:
    client = server.openai
    first = client.responses.create(model="tiny", input="hello wörld", metadata={"a": "b"})
    assert first.output_text == ECHO and first.status == "completed" and first.id.startswith("resp_")
    assert first.metadata == {"a": "b"} and first.usage and first.usage.input_tokens_details
    assert client.responses.retrieve(first.id).output_text == ECHO
    then = client.responses.create(input="more", previous_response_id=first.id, instructions="be kind", model="tiny")
    before = f"user\nhello wörld\nassistant\n{ECHO}\n"
    assert then.output_text == f"system\nbe kind\n{before}user\nmore\nassistant\n"
    third = client.responses.create(input="x", previous_response_id=then.id, model="tiny", max_output_tokens=5)
    assert third.status == "incomplete" and third.incomplete_details.reason == "max_output_tokens"  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(first.id)
    counted = client.responses.input_tokens.count(model="tiny", input="hello wörld").input_tokens
    assert counted == first.usage.input_tokens
    client.responses.delete(first.id)
    for call in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.create(input="x", model="tiny", previous_response_id=first.id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    unkept = client.responses.create(model="tiny", input="x", store=False)
    with pytest.raises(openai.NotFoundError, match=r"Response with id .* not found"):
        client.responses.retrieve(unkept.id)


@pytest.mark.parametrize("model", ["tiny", "burst"])
def test_a_streamed_response_is_the_same(server: Running, model: str) -> None:
    events = list(server.openai.responses.create(model=model, input=USER, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ECHO
    kept = server.openai.responses.retrieve(events[-1].response.id)
    assert kept.output_text == ECHO and kept.model_dump() == events[-1].response.model_dump()


def test_log_probabilities_of_a_response(server: Running) -> None:
    fields: Any = {"model": "tiny", "input": USER, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    (item,) = server.openai.responses.create(**fields).output
    scores = item.content[0].logprobs  # type: ignore[union-attr]
    assert scores and {len(score.top_logprobs) for score in scores} == {2}
    assert (
        b"".join(bytes(score.bytes) for score in scores).decode().replace("<|im_start|>", "").replace("<|im_end|>", "")
        == ECHO
    )
    events = list(server.openai.responses.create(**fields, stream=True))
    deltas = [event.logprobs for event in events if event.type == "response.output_text.delta"]
    assert all(deltas) and [score.token for delta in deltas for score in delta] == [score.token for score in scores]
    assert events[-1].response.output[0].content == item.content  # type: ignore[union-attr]
    assert server.openai.responses.create(model="tiny", input=USER).output[0].content[0].logprobs == []  # type: ignore[union-attr]


def test_a_response_that_fails_ends_with_an_event(server: Running) -> None:
    events = list(server.openai.responses.create(model="fail", input="hello", stream=True))
    assert events[-1].type == "response.failed" and "a fault of the fake" in events[-1].response.error.message


def test_responses_belong_to_their_tenant(model_dir: Any, tmp_path: Any) -> None:
    with serving(model_dir, tmp_path, "--api-key", "k1", "--api-key", "k2", key="k1") as server:
        made = server.openai.responses.create(model="tiny", input="x")
        assert server.openai.responses.retrieve(made.id).id == made.id
        for path, key in (("/v1/responses", "nobody"), ("/v1/messages", "nobody"), ("/api/chat", "nobody")):
            assert httpx.post(server.url + path, json={}, headers={"X-Api-Key": key}).status_code == 401
        other = server.openai.with_options(api_key="k2")
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.create(model="tiny", input="x", previous_response_id=made.id)


def test_items_become_messages() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It rains."}]},
    ]
    body = parse(ResponsesRequest, json.dumps({"input": items}).encode())
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert responses_form.messages_of(body) == [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["text", "tool_use", "message", "function_call", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "role", "content", "text", "id", "name", "input", "call_id"]), inner)
    ),
    max_leaves=12,
)


@given(
    st.lists(st.dictionaries(st.sampled_from(["type", "role", "content", "tool_calls", "output"]), JSON), min_size=1)
)
def test_any_items_are_translated_or_refused(items: list[dict[str, Any]]) -> None:
    for kind, name, form in (
        (MessagesRequest, "messages", messages_form.chat_of),
        (OllamaChatRequest, "messages", ollama_form.chat_of),
        (ResponsesRequest, "input", lambda body: responses_form.chat_of(body, [])),
    ):
        try:
            assert form(parse(kind, json.dumps({name: items}).encode()))["messages"] is not None  # type: ignore[operator]
        except ApiError as error:
            assert error.status == 400 and error.param


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
    for kind, sort in (("text", Kind.TEXT), ("reasoning", Kind.REASONING), ("call", Kind.CALL)):
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

    def served(front: Any, library: Any) -> Any:
        content = front.begin() + front.update(0, last) + front.end()

        def answer(request: Any) -> Any:
            return library.Response(200, content=content, headers={"content-type": "text/event-stream"})

        return library.Client(transport=library.MockTransport(answer))

    front = messages_form.MessagesFront("msg_1", "m", _Answers())  # type: ignore[arg-type]
    claude = anthropic.Anthropic(api_key="x", http_client=served(front, httpx2))
    with claude.messages.stream(model="m", max_tokens=9, messages=USER) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[2].input == {"x": 1} and message.stop_reason == "tool_use"  # type: ignore[union-attr]
    kept: list[Any] = []
    head = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m"}
    response = ResponsesFront(head, _Answers(), None, lambda *given: kept.append(given))  # type: ignore[arg-type]
    client = openai.OpenAI(api_key="x", http_client=served(response, httpx))
    *_, end = client.responses.create(model="m", input="x", stream=True)
    assert [item.type for item in end.response.output] == ["reasoning", "message", "function_call"]  # type: ignore[union-attr]
    assert end.response.output[2].arguments == '{"x": 1}'  # type: ignore[union-attr]
    assert kept[0][1]["tool_calls"][0]["id"] == "c0" and kept[0][1]["reasoning_content"] == "hm"


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 40)), max_size=30))
def test_the_store_is_bounded(given_: list[tuple[str, int]]) -> None:
    store, newest = ResponseStore(3, 60), ""
    for name, size in given_:
        store.keep(name, Stored("t", b"x" * size, b""))
        newest = name
        found = []
        for each in "abcdef":
            try:
                found.append(store.find("t", each))
            except ApiError as error:
                assert error.status == 404
        assert len(found) <= 3 and sum(stored.size for stored in found) <= 60
        assert store.find("t", newest).size == size
        with pytest.raises(ApiError):
            store.find("other", newest)


def test_small_endpoints(server: Running) -> None:
    assert server.http.get("/ping").status_code == server.http.post("/ping").status_code == 200
    assert server.http.get("/load").json()["server_load"] >= 0
    info = server.http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>" and "im_start" in info["chat_template"] and info["vocab_size"] > 256
