"""LiteLLM, of which many gateways are made."""

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
    TOO_LONG,
    WEATHER_ANSWER,
    WEATHER_QUESTION,
    WEATHER_RESULT,
    needs,
)

needs("litellm")

import litellm
from pydantic import BaseModel

from testing.waiting import PATIENCE_S
from tests.e2e.conftest import Server

TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": CITY}}


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module", params=["openai", "hosted_vllm"])
def ask(request: pytest.FixtureRequest, demo: Server) -> Any:
    """A completion through one of LiteLLM's providers."""

    def ask(text: str, **fields: Any) -> Any:
        messages = fields.pop("messages", [{"role": "user", "content": text}])
        return litellm.completion(
            model=f"{request.param}/demo",
            api_base=f"{demo.url}/v1",
            api_key="none",
            messages=messages,
            temperature=0,
            timeout=PATIENCE_S,
            num_retries=0,
            **fields,
        )

    return ask


def test_completion(ask: Any) -> None:
    answer = ask(SUM_QUESTION)
    assert answer.choices[0].message.content == SUM_ANSWER
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream(ask: Any) -> None:
    chunks = list(ask(SUM_QUESTION, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == SUM_ANSWER
    whole = litellm.stream_chunk_builder(chunks)
    assert whole is not None and whole.usage.completion_tokens > 3


@pytest.mark.parametrize("stream", [False, True])
def test_tools(ask: Any, stream: bool) -> None:
    answer = ask(WEATHER_QUESTION, tools=[TOOL], stream=stream)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer))
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps(WEATHER_RESULT)}
    messages = [{"role": "user", "content": WEATHER_QUESTION}, message.model_dump(), result]
    assert ask("", messages=messages, tools=[TOOL]).choices[0].message.content == WEATHER_ANSWER


def test_structured_output(ask: Any) -> None:
    text = ask(FILL_QUESTION, response_format=Person).choices[0].message.content
    assert json.loads(text) == FILL_ANSWER


def test_what_is_too_long_is_known_as_such(ask: Any) -> None:
    for fields in ({}, {"stream": True}):
        with pytest.raises(litellm.ContextWindowExceededError):
            ask(TOO_LONG, **fields)
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(SUM_QUESTION, max_tokens=10_000)


def test_other_errors_are_known_too(ask: Any, demo: Server) -> None:
    with pytest.raises(litellm.BadRequestError):
        ask(SUM_QUESTION, extra_body={"top_k": -7})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(
            model="openai/nobody",
            api_base=f"{demo.url}/v1",
            api_key="none",
            messages=[{"role": "user", "content": "x"}],
        )


def test_other_forms(demo: Server) -> None:
    """Through the translations of LiteLLM for Anthropic's and Ollama's endpoints, and its Responses."""
    messages = [{"role": "user", "content": SUM_QUESTION}]
    for model in ("anthropic/demo", "ollama_chat/demo"):
        answer: Any = litellm.completion(
            model=model, api_base=demo.url, api_key="none", messages=messages, temperature=0, max_tokens=50
        )
        assert answer.choices[0].message.content == SUM_ANSWER
    response: Any = litellm.responses(
        model="openai/demo", api_base=f"{demo.url}/v1", api_key="none", input=SUM_QUESTION, temperature=0
    )
    assert response.output_text == SUM_ANSWER
