"""Agents of pydantic-ai."""

from __future__ import annotations

import asyncio
from typing import Any

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

needs("pydantic_ai")

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.e2e.conftest import Server


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel])
def model(request: pytest.FixtureRequest, demo: Server) -> Any:
    return request.param("demo", provider=OpenAIProvider(base_url=f"{demo.url}/v1", api_key="none"))


def test_an_agent_answers(model: Any) -> None:
    result = Agent(model, model_settings={"temperature": 0}).run_sync(SUM_QUESTION)
    assert result.output == SUM_ANSWER and result.usage.output_tokens > 3


def test_an_agent_streams(model: Any) -> None:
    async def run() -> str:
        async with Agent(model, model_settings={"temperature": 0}).run_stream(SUM_QUESTION) as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    assert asyncio.run(run()) == SUM_ANSWER


def test_an_agent_uses_a_tool(model: Any) -> None:
    agent = Agent(model, model_settings={"temperature": 0})
    asked = []

    @agent.tool_plain
    def get_weather(city: str) -> dict[str, Any]:
        """The weather of a city."""
        asked.append(city)
        return WEATHER_RESULT

    assert agent.run_sync(WEATHER_QUESTION).output == WEATHER_ANSWER
    assert asked == ["Paris"]


def test_an_agent_fills_a_model(model: Any) -> None:
    settings: Any = {"temperature": 0}
    native = Agent(model, output_type=NativeOutput(Person), model_settings=settings)
    assert native.run_sync(FILL_QUESTION).output == Person(name="Tom", age=7)
    called = Agent(model, output_type=ToolOutput(Person), model_settings=settings)  # a call that is forced
    assert isinstance(called.run_sync(FILL_QUESTION).output, Person)
