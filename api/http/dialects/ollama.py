"""Ollama's chat and generate."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, ClassVar

import msgspec

from api.errors import ApiError, bad_request
from api.http.answers.generation import Answers, Update
from api.http.answers.streaming import Front
from api.http.bodies.dialects import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions
from api.http.dialects.blocks import Blocks, blocks_of
from api.http.dialects.content import continuation
from api.text.deltas import Delta, Reasoning, text_of

WORDS = {  # of a chat's fields
    "enable_thinking": "think",
    "reasoning_effort": "think",
    "response_format.json_schema.schema": "format",
    "response_format": "format",
    "max_tokens": "options.num_predict",
    "stop": "options.stop",
}
_OPTIONS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}


def error_body(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


# ---- requests


def chat_of(body: OllamaChatRequest | OllamaGenerateRequest) -> dict[str, Any]:
    """The same as a chat request. Raises ApiError that names the place."""
    chat = {"model": body.model, "stream": body.stream, **_options(body.options)}
    if isinstance(body.think, str):
        chat["reasoning_effort"] = body.think
    elif body.think is not None:
        chat["enable_thinking"] = body.think
    if body.format == "json":
        chat["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, dict):
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "format", "schema": body.format}}
    if isinstance(body, OllamaGenerateRequest):
        system = [{"role": "system", "content": body.system}] if body.system else []
        chat["messages"] = [*system, {"role": "user", "content": body.prompt}]
    else:
        chat["messages"] = _messages(body.messages)
        chat |= continuation(chat["messages"])
        if body.tools:
            chat["tools"] = body.tools
    return chat


def completion_of(body: OllamaGenerateRequest) -> dict[str, Any]:
    """Of a raw prompt; without `num_predict` the output has the rest of the context, up to a bound."""
    if body.system or body.think is not None or body.format not in (None, ""):
        raise bad_request("raw: no system, think or format goes with it", "raw")
    return {"model": body.model, "stream": body.stream, "prompt": body.prompt, **_options(body.options)}


def _options(options: OllamaOptions | None) -> dict[str, Any]:
    given = {} if options is None else options.model_dump(exclude_unset=True)
    if given.get("num_predict", 0) < 0:  # as much as fits
        del given["num_predict"]
    return {_OPTIONS.get(name, name): value for name, value in given.items() if value is not None}


def _messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Their calls have no ids: a result belongs to the first call of its tool that has none."""
    result, open_calls, count = [], list[tuple[str, str]](), 0
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if message.get("images"):
            raise bad_request(f"{where}.images: the model reads text only", f"{where}.images", "unsupported_field")
        own = {key: value for key, value in message.items() if key not in ("images", "thinking", "tool_name")}
        if message.get("thinking"):
            own["reasoning_content"] = message["thinking"]
        if isinstance(calls := message.get("tool_calls"), list):
            own["tool_calls"] = []
            for call in calls:
                name, arguments = _called(call, f"{where}.tool_calls")
                count += 1
                open_calls.append((name, f"call_{count}"))
                function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                own["tool_calls"].append({"id": f"call_{count}", "type": "function", "function": function})
        if message.get("role") == "tool":
            asked = message.get("tool_name")
            found = next((each for each in open_calls if asked in (None, each[0])), None)
            if found is None:
                raise bad_request(f"{where}: no call of this tool precedes its result", where)
            open_calls.remove(found)
            own["tool_call_id"] = found[1]
        result.append(own)
    return result


def _called(call: Any, where: str) -> tuple[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f'{where}: {{"function": {{"name", "arguments"}}}} is expected', where)
    return function["name"], function.get("arguments", {})


# ---- answers


class OllamaFront(Front):
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
