"""One streamed completion over a connection of its own, timed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from loadtests import http
from loadtests.http import HttpError


@dataclass
class Result:
    """Seconds; `gaps_s` are between events that bring text. `error`: "" or why it failed."""

    ttft_s: float = 0.0
    total_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def tpot_s(self) -> float:
        """Per token after the first."""
        return (self.total_s - self.ttft_s) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass(frozen=True)
class Server(http.Server):
    """An OpenAI-compatible one."""

    timeout_s: float = 600.0

    async def read(self, path: str) -> bytes:
        """Raises HttpError or OSError."""
        answer = await self._waited(self.get(path))
        if answer.status != 200:
            raise HttpError(f"GET {path}: {answer.refusal}")
        return answer.body

    async def base_model(self) -> str:
        """The first that the server lists. Raises HttpError or OSError."""
        listed = json.loads(await self.read("/v1/models"))["data"]
        bases = [model["id"] for model in listed if not model.get("parent")]
        if not bases:
            raise HttpError("/v1/models lists no model: name one with --models")
        return str(bases[0])

    async def count(self, body: dict[str, Any]) -> int | None:
        """Tokens of a request's prompt or messages, by /tokenize; None where the server has none such."""
        asked: dict[str, Any] = {name: body[name] for name in ("model", "prompt", "messages") if name in body}
        try:
            answer = await self._waited(self.post("/tokenize", asked))
            count = answer.json()["count"] if answer.status == 200 else None
        except (OSError, HttpError, ValueError, KeyError, TypeError):
            return None
        return count if isinstance(count, int) else None

    async def stream(self, path: str, body: dict[str, Any]) -> Result:
        """Never raises for what the server does; the result has the error."""
        result, began = Result(), time.perf_counter()
        try:
            answer = await self._waited(self.post(path, body))
            result.total_s = answer.ended_s - answer.asked_s  # without what reading its events takes
            _read(answer, result)
        except (OSError, HttpError, ValueError) as error:
            result.error = str(error) if isinstance(error, HttpError) else f"{type(error).__name__}: {error}"
            result.total_s = result.total_s or time.perf_counter() - began
        return result

    async def _waited(self, answer: Coroutine[Any, Any, http.Answer]) -> http.Answer:
        try:
            return await asyncio.wait_for(answer, self.timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            raise HttpError(f"no end after {self.timeout_s:g} s") from None


def _read(answer: http.Answer, result: Result) -> None:
    """Raises HttpError, ValueError for what is no JSON."""
    if answer.status != 200:
        raise HttpError(answer.refusal)
    last, pieces, ended = answer.asked_s, 0, False
    for when, data in answer.events():
        if data == "[DONE]":
            ended = True
            break
        event = json.loads(data)
        if "error" in event:
            raise HttpError(str(event["error"]))
        usage = event.get("usage") or {}
        result.tokens = usage.get("completion_tokens", result.tokens)
        result.prompt_tokens = usage.get("prompt_tokens", result.prompt_tokens)
        if not (text := "".join(_text(choice) for choice in event.get("choices", ()))):
            continue
        result.text += text
        if pieces:
            result.gaps_s.append(when - last)
        else:
            result.ttft_s = when - last
        pieces, last = pieces + 1, when
    if not ended:
        raise HttpError("the stream ended without [DONE]")
    if not pieces:
        raise HttpError("no text came")
    result.tokens = result.tokens or pieces  # of a server that does not tell


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return str(choice.get("text") or delta.get("content") or delta.get("reasoning_content") or "")
