"""Anthropic's own client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.asked import (
    CITY,
    FILL_QUESTION,
    SUM_ANSWER,
    SUM_QUESTION,
    WEATHER_ANSWER,
    WEATHER_QUESTION,
    WEATHER_RESULT,
    needs,
)

needs("anthropic")

import anthropic
from pydantic import BaseModel

from testing.waiting import PATIENCE_S
from tests.e2e.conftest import Server

TOOL: Any = {"name": "get_weather", "description": "The weather of a city.", "input_schema": CITY}
SETTINGS: Any = {"model": "demo", "max_tokens": 100, "extra_body": {"temperature": 0}}


class Person(BaseModel):
    name: str
    age: int


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def client(demo: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=demo.url, api_key="none", max_retries=0, timeout=PATIENCE_S)


def test_messages(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(messages=user(SUM_QUESTION), **SETTINGS)
    assert [block.text for block in answer.content if block.type == "text"] == [SUM_ANSWER]
    assert answer.stop_reason == "end_turn"
    counted = client.messages.count_tokens(model="demo", messages=user(SUM_QUESTION)).input_tokens
    assert counted == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(messages=user(SUM_QUESTION), **SETTINGS) as stream:
        assert "".join(stream.text_stream) == SUM_ANSWER
        assert stream.get_final_message().usage.output_tokens > 3


@pytest.mark.parametrize("stream", [False, True])
def test_tools(client: anthropic.Anthropic, stream: bool) -> None:
    asked: Any = {**SETTINGS, "tools": [TOOL], "messages": user(WEATHER_QUESTION)}
    if stream:
        with client.messages.stream(**asked) as events:
            first = events.get_final_message()
    else:
        first = client.messages.create(**asked)
    assert first.stop_reason == "tool_use"
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": json.dumps(WEATHER_RESULT)}
    messages = [*asked["messages"], {"role": "assistant", "content": first.content}]
    messages.append({"role": "user", "content": [result]})
    last = client.messages.create(**{**asked, "messages": messages})
    assert [block.text for block in last.content if block.type == "text"] == [WEATHER_ANSWER]


def test_a_forced_tool(client: anthropic.Anthropic) -> None:
    choice: Any = {"type": "tool", "name": "get_weather"}
    answer = client.messages.create(messages=user("Hello!"), tools=[TOOL], tool_choice=choice, **SETTINGS)
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert isinstance(call.input, dict) and isinstance(call.input["city"], str)


def test_structured_output(client: anthropic.Anthropic) -> None:
    answer = client.messages.parse(messages=user(FILL_QUESTION), output_format=Person, **SETTINGS)
    assert answer.parsed_output == Person(name="Tom", age=7)


def test_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(messages=user("x"), **{**SETTINGS, "model": "nobody"})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(messages=user("word " * 5000), **SETTINGS)
