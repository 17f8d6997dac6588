"""Answers as lines of Ollama's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, ClassVar

import msgspec

from api.dialects.common.blocks import Blocks, blocks_of
from api.errors import ApiError
from api.http.answers.generation import Answers, Update
from api.http.answers.streaming import ResponseFormatter
from api.text.deltas import Delta, Reasoning, text_of


def error_body(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


class OllamaFormatter(ResponseFormatter):
    """`field`: "message" of a chat, "response" of a generation. Calls are written whole, at the end."""

    media_type: ClassVar[str] = "application/x-ndjson"
    keep_alive: ClassVar[bytes] = b""
    close: ClassVar[bytes] = b""

    def __init__(self, model: str, answers: Answers, field: str) -> None:
        self._model = model
        self._answers = answers
        self._field = field
        self._blocks = Blocks()
        self._reason = "stop"
        self._began = time.monotonic()

    def whole(self, choices: Sequence[Update]) -> dict[str, Any]:
        blocks = blocks_of(choices[0].deltas)
        return {**self._head(), **self._part(choices[0].deltas, blocks), **self._last(choices[0].finish_reason)}

    def _head(self) -> dict[str, Any]:
        now = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
        return {"model": self._model, "created_at": now}

    def _part(self, deltas: Sequence[Delta], calls: Blocks | None = None) -> dict[str, Any]:
        text = text_of(deltas)
        thinking = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if self._field == "response":
            return {"response": text, **more}
        if calls is not None and calls.calls:
            functions = [{"name": call.name, "arguments": call.arguments} for call in calls.calls]
            more["tool_calls"] = [{"function": function} for function in functions]
        return {"message": {"role": "assistant", "content": text, **more}}

    def _last(self, reason: str | None) -> dict[str, Any]:
        usage = self._answers.usage()
        taken_ns = int((time.monotonic() - self._began) * 1e9)
        return {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": taken_ns,
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "eval_count": usage["completion_tokens"],
            "eval_duration": taken_ns,
        }

    def begin(self) -> bytes:
        return b""

    def update(self, index: int, update: Update) -> bytes:
        self._reason = update.finish_reason or self._reason
        for _ in self._blocks.push(update.deltas):
            pass
        shown = [delta for delta in update.deltas if isinstance(delta, Reasoning) or text_of([delta])]
        return _line({**self._head(), **self._part(shown), "done": False}) if shown else b""

    def end(self) -> bytes:
        return _line({**self._head(), **self._part([], self._blocks), **self._last(self._reason)})

    def error(self, error: ApiError) -> bytes:
        return _line(error_body(error))


def _line(data: dict[str, Any]) -> bytes:
    return msgspec.json.encode(data) + b"\n"
