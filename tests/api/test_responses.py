"""OpenAI's responses: their own client, what is kept of them, and items that become messages."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.bodies.parsing import Notes, parse
from api.dialects.anthropic import requests as messages_form
from api.dialects.anthropic.requests import MessagesRequest
from api.dialects.ollama import requests as ollama_form
from api.dialects.ollama.requests import OllamaChatRequest
from api.dialects.responses import requests as responses_form
from api.dialects.responses.requests import ResponsesRequest
from api.dialects.responses.store import ResponseStore, Stored
from api.errors import ApiError
from tests.api.conftest import Running, serving

USER: Any = [{"role": "user", "content": "hello wörld"}]
ECHO = "user\nhello wörld\nassistant\n"  # the fake answers with the prompt


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
    assert responses_form.chat_of(body, [], Notes()).messages == [
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
        (MessagesRequest, "messages", lambda body: messages_form.chat_of(body, Notes())),
        (OllamaChatRequest, "messages", lambda body: ollama_form.chat_of(body, Notes())),
        (ResponsesRequest, "input", lambda body: responses_form.chat_of(body, [], Notes()).chat),
    ):
        try:
            assert form(parse(kind, json.dumps({name: items}).encode()))["messages"] is not None  # type: ignore[operator]
        except ApiError as error:
            assert error.status == 400 and error.param


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
