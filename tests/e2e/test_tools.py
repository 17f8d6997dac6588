"""Calls of tools by the demo model over HTTP, with OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from demo.texts.tools import CLOCK, WEATHER
from tests.e2e.conftest import Server

SCHEMAS: dict[str, dict[str, Any]] = {
    "paint": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "coats": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["colour", "coats"],
        "additionalProperties": False,
    },
    "visit": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
ASK: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Paint the house."}],
    "tools": TOOLS,
    "temperature": 1.0,
    "max_tokens": 200,
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("only", [None, *SCHEMAS])
def test_forced_calls_fit_their_schemas(demo: Server, only: str | None, seed: int) -> None:
    choice: Any = "required" if only is None else {"type": "function", "function": {"name": only}}
    (answer,) = demo.client.chat.completions.create(
        **ASK, tool_choice=choice, parallel_tool_calls=False, seed=seed
    ).choices
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert only in (None, call.function.name)
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_streamed_and_whole_are_the_same(demo: Server) -> None:
    asked = {**ASK, "tool_choice": "required", "parallel_tool_calls": False, "seed": 7}
    (whole,) = demo.client.chat.completions.create(**asked).choices
    name = arguments = ""
    for chunk in demo.client.chat.completions.create(**asked, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    (call,) = whole.message.tool_calls
    assert (name, arguments) == (call.function.name, call.function.arguments)


def test_a_question_is_answered_with_a_tools_result(demo: Server) -> None:
    """Of its own will: the demo model has learnt these tools."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked: dict[str, Any] = {"model": "demo", "tools": [WEATHER, CLOCK], "temperature": 0, "max_tokens": 100}
    (first,) = demo.client.chat.completions.create(**asked, messages=messages).choices
    assert first.finish_reason == "tool_calls"
    (call,) = first.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    messages.append(first.message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps({"sky": "snowy", "degrees": 3})})
    (last,) = demo.client.chat.completions.create(**asked, messages=messages).choices
    assert last.finish_reason == "stop" and last.message.content == "It is snowy in Paris, 3 degrees."
