"""Ollama's own client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.asked import (
    CITY,
    FILL_ANSWER,
    FILL_QUESTION,
    SUM_ANSWER,
    SUM_QUESTION,
    WEATHER_ANSWER,
    WEATHER_QUESTION,
    WEATHER_RESULT,
    needs,
)

needs("ollama")

import ollama

from testing.waiting import PATIENCE_S
from tests.e2e.conftest import Server

TOOL: Any = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": CITY}}
GREEDY: Any = {"temperature": 0}


@pytest.fixture(scope="module")
def client(demo: Server) -> ollama.Client:
    return ollama.Client(host=demo.url, timeout=PATIENCE_S)


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_chat(client: ollama.Client) -> None:
    answer = client.chat("demo", user(SUM_QUESTION), options=GREEDY)
    assert answer.message.content == SUM_ANSWER and answer.done_reason == "stop" and (answer.eval_count or 0) > 3
    pieces = list(client.chat("demo", user(SUM_QUESTION), options=GREEDY, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == SUM_ANSWER and pieces[-1].done


def test_generate(client: ollama.Client) -> None:
    assert client.generate("demo", SUM_QUESTION, options=GREEDY).response == SUM_ANSWER
    pieces = list(client.generate("demo", SUM_QUESTION, options=GREEDY, stream=True))
    assert "".join(piece.response for piece in pieces) == SUM_ANSWER


@pytest.mark.parametrize("stream", [False, True])
def test_tools(client: ollama.Client, stream: bool) -> None:
    asked: Any = client.chat("demo", user(WEATHER_QUESTION), tools=[TOOL], options=GREEDY, stream=stream)
    messages = [piece.message for piece in asked] if stream else [asked.message]
    (message,) = [message for message in messages if message.tool_calls]
    (call,) = message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    result = {"role": "tool", "tool_name": "get_weather", "content": json.dumps(WEATHER_RESULT)}
    history: Any = [*user(WEATHER_QUESTION), message, result]
    assert client.chat("demo", history, tools=[TOOL], options=GREEDY).message.content == WEATHER_ANSWER


def test_structured_output(client: ollama.Client) -> None:
    schema: Any = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
    answer = client.chat("demo", user(FILL_QUESTION), format=schema, options=GREEDY)
    assert json.loads(answer.message.content or "") == FILL_ANSWER


def test_list_and_show(client: ollama.Client) -> None:
    assert {"demo:latest", "demo"} & {str(model.model) for model in client.list().models}
    shown = client.show("demo")
    assert shown.details is not None and shown.capabilities is not None and "completion" in shown.capabilities
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat("nobody", user("x"))
    assert caught.value.status_code == 404
