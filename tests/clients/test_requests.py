"""What programs that are no libraries send, as they send it."""

from __future__ import annotations

import json
from typing import Any

from tests.clients.asked import SUM_ANSWER, SUM_QUESTION, WEATHER_QUESTION, needs

needs()

from tests.e2e.conftest import Server


def events(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


def test_open_webui(demo: Server) -> None:
    """It lists the models, then sends tools with every chat, and asks for titles and tags beside it."""
    models = demo.http.get("/v1/models").json()["data"]
    assert {"demo", "pirate", "json"} <= {model["id"] for model in models}
    tool = {
        "type": "function",
        "function": {
            "name": "search_notes",
            "description": "Search the user's notes.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}, "count": {"type": "integer", "default": 5}},
                "required": ["query"],
            },
        },
    }
    body = {
        "stream": True,
        "model": "demo",
        "messages": [{"role": "user", "content": SUM_QUESTION}],
        "temperature": 0,
        "tools": [tool],
        "stream_options": {"include_usage": True},
        "metadata": {"user_id": "u", "chat_id": "c", "features": {"web_search": False}},
    }
    chunks = events(demo, "/v1/chat/completions", body)
    assert text_of(chunks) == SUM_ANSWER
    assert chunks[-1]["usage"]["completion_tokens"] > 3
    title = {"model": "demo", "messages": body["messages"], "stream": False, "max_completion_tokens": 50}
    assert demo.http.post("/v1/chat/completions", json=title).json()["choices"][0]["message"]["content"]


def test_guidellm(demo: Server) -> None:
    """It measures with the usage in every event, and bounds outputs exactly."""
    shared = {
        "model": "demo",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "ignore_eos": True,
        "stop": None,
    }
    chat = {**shared, "messages": [{"role": "user", "content": [{"type": "text", "text": SUM_QUESTION}]}],
            "max_completion_tokens": 16}  # fmt: skip
    text = {**shared, "prompt": SUM_QUESTION, "max_tokens": 16}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", text)):
        chunks = events(demo, path, body)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 16
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {chunks[-1]["usage"]["prompt_tokens"]}


def test_editors_and_agents(demo: Server) -> None:
    """Text parts with marks for caches, an assistant's message as it came, empty lists, nulls, fields of others."""
    first = demo.http.post(
        "/v1/chat/completions",
        json={"model": "demo", "temperature": 0, "messages": [{"role": "user", "content": SUM_QUESTION}]},
    ).json()["choices"][0]["message"]
    part = {"type": "text", "text": "What is 4 + 5?", "cache_control": {"type": "ephemeral"}}
    body = {
        "model": "demo",
        "temperature": 0,
        "messages": [
            {"role": "user", "content": SUM_QUESTION},
            {**first, "provider_specific_fields": {"refusal": None}},
            {"role": "user", "content": [part], "name": None},
        ],
        "tools": [],
        "tool_choice": None,
        "parallel_tool_calls": True,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "user": "me",
        "top_logprobs": None,
        "drop_params": True,
    }
    answer = demo.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "4 + 5 = 9."
    for name in ("messages[].provider_specific_fields", "messages[].content[].cache_control", "drop_params"):
        assert name in answer.headers["warnings"]


def test_claude_code(demo: Server) -> None:
    """Its headers, blocks with marks for caches, a budget of reasoning, many tools."""
    mark = {"cache_control": {"type": "ephemeral"}}
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    names = ("get_weather", "get_time", "read_file")
    body = {
        "model": "demo",
        "max_tokens": 200,
        "system": [{"type": "text", "text": "Be brief.", **mark}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": WEATHER_QUESTION, **mark}]}],
        "tools": [{"name": name, "description": name, "input_schema": schema, **mark} for name in names],
        "metadata": {"user_id": "user_1"},
        "thinking": {"type": "enabled", "budget_tokens": 100},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "temperature": 1,
        "stream": True,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "none"}
    answer = demo.http.post("/v1/messages?beta=true", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert "event: message_stop" in answer.text
    counted = {key: body[key] for key in ("model", "system", "messages", "tools", "thinking")}
    assert demo.http.post("/v1/messages/count_tokens?beta=true", json=counted).json()["input_tokens"] > 20
