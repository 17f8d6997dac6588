"""LangChain's ChatOpenAI."""

from __future__ import annotations

import json

import pytest

from tests.clients.asked import (
    FILL_QUESTION,
    SUM_ANSWER,
    SUM_QUESTION,
    WEATHER_ANSWER,
    WEATHER_QUESTION,
    WEATHER_RESULT,
    needs,
)

needs("langchain_openai")

from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

from testing.waiting import PATIENCE_S
from tests.e2e.conftest import Server


class Person(BaseModel):
    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return json.dumps(WEATHER_RESULT)


@pytest.fixture(scope="module")
def chat(demo: Server) -> ChatOpenAI:
    return ChatOpenAI(
        model="demo", base_url=f"{demo.url}/v1", api_key="none", temperature=0, timeout=PATIENCE_S, max_retries=0
    )


def test_invoke(chat: ChatOpenAI) -> None:
    answer = chat.invoke(SUM_QUESTION)
    assert answer.content == SUM_ANSWER
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] > 3
    assert answer.response_metadata["finish_reason"] == "stop"


def test_stream(chat: ChatOpenAI) -> None:
    pieces = list(chat.stream(SUM_QUESTION, stream_usage=True))
    assert "".join(str(piece.content) for piece in pieces) == SUM_ANSWER and len(pieces) > 3
    assert any(piece.usage_metadata for piece in pieces)


def test_batch(chat: ChatOpenAI) -> None:
    answers = chat.batch([f"What is {n} + 3?" for n in range(4)])
    assert [answer.content for answer in answers] == [f"{n} + 3 = {n + 3}." for n in range(4)]


def test_tools(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([get_weather])
    messages = [HumanMessage(WEATHER_QUESTION)]
    called = bound.invoke(messages)
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert bound.invoke([*messages, called, result]).content == WEATHER_ANSWER


def test_streamed_and_forced_tools(chat: ChatOpenAI) -> None:
    whole: AIMessageChunk | None = None
    for piece in chat.bind_tools([get_weather], tool_choice="get_weather").stream(WEATHER_QUESTION):
        assert isinstance(piece, AIMessageChunk)
        whole = piece if whole is None else whole + piece
    assert whole is not None
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("get_weather", {"city": "Paris"})]


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(chat: ChatOpenAI, method: str) -> None:
    found = chat.with_structured_output(Person, method=method).invoke(FILL_QUESTION)  # type: ignore[arg-type]
    assert isinstance(found, Person)
    if method != "function_calling":  # a tool that the demo model has not learnt
        assert found == Person(name="Tom", age=7)


def test_responses(demo: Server) -> None:
    chat = ChatOpenAI(model="demo", base_url=f"{demo.url}/v1", api_key="none", temperature=0, use_responses_api=True)
    assert chat.invoke(SUM_QUESTION).text == SUM_ANSWER
    assert "".join(piece.text for piece in chat.stream(SUM_QUESTION)) == SUM_ANSWER
    (call,) = chat.bind_tools([get_weather]).invoke(WEATHER_QUESTION).tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    assert chat.with_structured_output(Person).invoke(FILL_QUESTION) == Person(name="Tom", age=7)


def test_text_completions(demo: Server) -> None:
    model = OpenAI(model="demo", base_url=f"{demo.url}/v1", api_key="none", temperature=0, max_tokens=8)
    whole = model.invoke("Once")
    assert whole and "".join(model.stream("Once")) == whole
