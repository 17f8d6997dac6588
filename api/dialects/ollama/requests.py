"""Ollama's requests as chats and completions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from api.bodies.generation import CompletionRequest
from api.bodies.parsing import Notes, parse, parse_object
from api.dialects.common.content import continuation
from api.dialects.ollama.bodies import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions
from api.errors import bad_request
from api.prepare.job import Job, Prepared
from api.prepare.prompts import Preparer

WORDS = {  # of a chat's fields
    "enable_thinking": "think",
    "reasoning_effort": "think",
    "response_format.json_schema.schema": "format",
    "response_format": "format",
    "max_tokens": "options.num_predict",
    "stop": "options.stop",
}
_OPTIONS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}


def prepare_chat(prompts: Preparer, job: Job, raw: bytes, notes: Notes) -> Prepared:
    return prompts.chat_of(chat_of(parse(OllamaChatRequest, raw, notes)), job, notes, WORDS)


def prepare_generate(prompts: Preparer, job: Job, raw: bytes, notes: Notes) -> Prepared:
    body = parse(OllamaGenerateRequest, raw, notes)
    if not body.raw:
        return prompts.chat_of(chat_of(body), job, notes, WORDS)
    prepared = prompts.completion(parse_object(CompletionRequest, completion_of(body)), job)
    return msgspec.structs.replace(prepared, is_raw=True)


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
