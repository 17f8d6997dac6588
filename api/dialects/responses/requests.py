"""The items of OpenAI's Responses as chat requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from api.bodies.generation import SamplingFields
from api.bodies.parsing import Notes, parse
from api.dialects.common.content import kind_of, response_format, string_in, text_in, unsupported
from api.dialects.responses.bodies import ResponsesRequest
from api.errors import bad_request, shortened
from api.prepare.job import Job, Prepared
from api.prepare.prompts import Preparer

_TEXTS = ("input_text", "output_text", "text")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
WORDS = {  # of a chat's fields
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "messages": "input",
}
_SAMPLING = set(SamplingFields.model_fields)
_OURS = {"structured_outputs", "chat_template_kwargs"}
NOT_REPEATED = {"input", "stream", "model", "include", *_OURS, *(_SAMPLING - {"temperature", "top_p"})}


def prepare(prompts: Preparer, job: Job, raw: bytes, notes: Notes) -> Prepared:
    """Nothing but the name of the response before, if the job does not have its messages."""
    body = parse(ResponsesRequest, raw, notes)
    if body.previous_response_id is not None and job.history is None:
        return Prepared(b"", previous=body.previous_response_id)
    history = [] if job.history is None else msgspec.json.decode(job.history)
    prepared = prompts.chat_of(chat_of(body, history), job, notes, WORDS)
    messages = msgspec.json.encode([*history, *messages_of(body)])
    head = body.model_dump_json(by_alias=True, exclude=NOT_REPEATED).encode()
    return msgspec.structs.replace(prepared, messages=messages, head=head)


def chat_of(body: ResponsesRequest, history: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The same as a chat request. `history`: the messages of the response before. Raises ApiError naming the place."""
    messages = [*history, *messages_of(body)]
    if body.instructions is not None:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    chat: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "max_tokens": body.max_output_tokens,
        "stream": body.stream,
        **body.model_dump(include=_SAMPLING | _OURS, by_alias=True, exclude_unset=True),
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs if body.logprobs else None,
        "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)] or None,
        "parallel_tool_calls": body.parallel_tool_calls if body.tools else None,
        "tool_choice": _choice(body.tool_choice) if body.tools else None,
        "response_format": response_format(body.text.format if body.text else None),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
    }
    return {name: value for name, value in chat.items() if value is not None}


def messages_of(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The input's items as messages; calls and reasoning join the assistant's message that they belong to."""
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(body.input):
        _add_item(messages, item, f"input[{i}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    kind = kind_of(item, where) if "type" in item else "message"
    match kind:
        case "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                allowed = "'user', 'assistant', 'system' or 'developer'"
                raise bad_request(f"{where}.role: {allowed} is expected, got {shortened(role)}", f"{where}.role")
            content = text_in(item.get("content"), f"{where}.content", _TEXTS)
            if role == "assistant":
                last = _assistant(messages)
                last["content"] += content
            else:
                messages.append({"role": role, "content": content})
        case "function_call":
            function = {"name": string_in(item, "name", where), "arguments": string_in(item, "arguments", where)}
            call = {"id": string_in(item, "call_id", where), "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            text = text_in(item.get("output"), f"{where}.output", _TEXTS)
            messages.append({"role": "tool", "tool_call_id": string_in(item, "call_id", where), "content": text})
        case "reasoning":
            last = _assistant(messages)
            text = text_in(item.get("content") or [], f"{where}.content", ("reasoning_text", "text"))
            last["reasoning_content"] = last.get("reasoning_content", "") + text
        case _:
            raise unsupported(where, kind, _ITEMS)


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if (kind := kind_of(tool, where)) != "function":
        raise unsupported(f"{where}.type", kind, ("function",))
    function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _choice(choice: str | dict[str, Any]) -> Any:
    if isinstance(choice, str):
        return choice
    if (kind := kind_of(choice, "tool_choice")) != "function":
        raise unsupported("tool_choice.type", kind, ("function",))
    return {"type": "function", "function": {"name": string_in(choice, "name", "tool_choice")}}
