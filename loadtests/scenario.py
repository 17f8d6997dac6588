"""Streaming chats over the base model and all adapters. Usable with locust's own command too:
`locust -f loadtests/scenario.py --host URL`.

Besides each whole answer ("chat"), time to first token ("TTFT") and the gaps between pieces of text ("ITL") are
events of their own, by model.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from locust import User, constant, task

PROMPTS = (
    "Hello!",
    "What is 3 plus 4?",
    "Count from 1 to 5.",
    "What colour is the sky?",
    "Tell me a short story.",
)
_TIMEOUT_S = 300


class Chat(User):  # type: ignore[misc]  # locust has no types
    """One person who asks again as soon as the answer is there. LOAD_MAX_TOKENS bounds answers,
    LOAD_API_KEY is sent if set."""

    wait_time = constant(0)

    def on_start(self) -> None:
        self.random = random.Random(self.environment.runner.user_count)  # the same prompts in every run
        self.max_tokens = int(os.environ.get("LOAD_MAX_TOKENS", "64"))
        self.models = list_models(self.host)

    @task  # type: ignore[untyped-decorator]
    def chat(self) -> None:
        model = self.random.choice(self.models)
        body = {
            "model": model,
            "messages": [{"role": "user", "content": self.random.choice(PROMPTS)}],
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = last = time.perf_counter()
        pieces, tokens, error = 0, 0, None
        try:
            for event in self._events(body):
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
                if any(choice["delta"].get("content") for choice in event["choices"]):
                    now = time.perf_counter()
                    self._fire("ITL" if pieces else "TTFT", model, now - last)
                    pieces, last = pieces + 1, now
        except (OSError, http.client.HTTPException, ValueError, LoadError) as failure:
            error = failure
        self._fire("chat", model, time.perf_counter() - began, tokens, error)

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with _request(self.host, "POST", "/v1/chat/completions", body) as response:
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    return
                if data and not data.startswith(":"):
                    event: dict[str, Any] = json.loads(data)
                    if "error" in event:
                        raise LoadError(event["error"]["message"])
                    yield event
        raise LoadError("the stream ended without [DONE]")

    def _fire(self, kind: str, model: str, seconds: float, tokens: int = 0, error: Exception | None = None) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name=model,
            response_time=seconds * 1000,
            response_length=tokens,
            exception=error,
            context={},
        )


class LoadError(Exception):
    """The server answered with an error."""


def list_models(host: str) -> list[str]:
    """The base and all adapters that the key may see. Raises LoadError or OSError."""
    with _request(host, "GET", "/v1/models") as response:
        return [model["id"] for model in json.loads(response.read())["data"]]


def _request(host: str, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
    parts = urlsplit(host)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if key := os.environ.get("LOAD_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    connection.request(method, path, json.dumps(body) if body is not None else None, headers)
    response = connection.getresponse()
    if response.status != 200:
        raise LoadError(f"{response.status}: {response.read(500).decode(errors='replace')}")
    return response
