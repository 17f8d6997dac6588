"""Anthropic's Messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from api.errors import ApiError, bad_request, shortened
from api.http.answers.generation import Answers, Update
from api.http.answers.streaming import Front
from api.http.bodies.dialects import MessagesRequest, OutputConfig, SchemaFormat
from api.http.dialects.blocks import Block, Blocks, Change, Kind, blocks_of
from api.http.dialects.content import continuation, kind_of, response_format, string_in, text_in, unsupported

_PARTS = ("text", "tool_use", "tool_result", "thinking")
WORDS = {  # of a chat's fields
    "enable_thinking": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: ApiError) -> dict[str, Any]:
    return {"type": "error", "error": {"type": _ERRORS.get(error.status, "api_error"), "message": error.message}}


# ---- requests


def chat_of(body: MessagesRequest) -> dict[str, Any]:
    """The same as a chat request. Raises ApiError that names the place."""
    messages = [] if body.system is None else [{"role": "system", "content": text_in(body.system, "system")}]
    for i, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{i}]")
    chat: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences or None,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)] or None,
        **_choice(body),
        **continuation(messages),
    }
    if (thinking := body.thinking) is not None:
        chat["enable_thinking"] = thinking.type != "disabled"
        chat["include_reasoning"] = thinking.display != "omitted"
        chat["thinking_token_budget"] = thinking.budget_tokens
    config = body.output_config or OutputConfig()
    chat["reasoning_effort"] = config.effort
    chat["response_format"] = response_format(_one_format(body, config))
    return {name: value for name, value in chat.items() if value is not None}


def _one_format(body: MessagesRequest, config: OutputConfig) -> SchemaFormat | None:
    if body.output_format is not None and config.format is not None:
        raise bad_request("output_format and output_config.format are one field; send one of them", "output_format")
    return config.format or body.output_format


def _messages(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """One of theirs may hold several of ours: each result of a tool is a message."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"{where}.role: 'user' or 'assistant' is expected, got {shortened(role)}", f"{where}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise bad_request(f"{where}.content: a text or a list of blocks is expected", f"{where}.content")
    texts: list[str] = []
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for i, part in enumerate(content):
        place = f"{where}.content[{i}]"
        match kind_of(part, place):
            case "text":
                texts.append(string_in(part, "text", place))
            case "thinking":
                reasoning.append(string_in(part, "thinking", place))
            case "redacted_thinking":
                continue  # what another server hid
            case "tool_use":
                calls.append(_call(part, place))
            case "tool_result":
                result = part.get("content", "")
                text = text_in("" if result is None else result, f"{place}.content")
                results.append({"role": "tool", "tool_call_id": string_in(part, "tool_use_id", place), "content": text})
            case kind:
                raise unsupported(place, kind, _PARTS)
    own: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if calls:
        own["tool_calls"] = calls
    if reasoning:
        own["reasoning_content"] = "".join(reasoning)
    return [*results, *([own] if texts or calls or reasoning or not results else [])]


def _call(part: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = json.dumps(part.get("input", {}), ensure_ascii=False)
    function = {"name": string_in(part, "name", where), "arguments": arguments}
    return {"id": string_in(part, "id", where), "type": "function", "function": function}


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type", "custom")
    if kind != "custom":
        raise unsupported(f"{where}.type", kind, ("custom",))
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _choice(body: MessagesRequest) -> dict[str, Any]:
    if body.tool_choice is None:
        return {}
    kind = kind_of(body.tool_choice, "tool_choice")
    parallel = {"parallel_tool_calls": False} if body.tool_choice.get("disable_parallel_tool_use") is True else {}
    if kind == "tool":
        named = {"type": "function", "function": {"name": string_in(body.tool_choice, "name", "tool_choice")}}
        return {"tool_choice": named, **parallel}
    choices = {"auto": "auto", "any": "required", "none": "none"}
    if kind not in choices:
        raise unsupported("tool_choice.type", kind, (*choices, "tool"))
    return {"tool_choice": choices[kind], **parallel}


# ---- answers


class MessagesFront(Front):
    """An answer in the form of /v1/messages, whole or as events."""

    keep_alive: ClassVar[bytes] = b'event: ping\ndata: {"type":"ping"}\n\n'
    close: ClassVar[bytes] = b""

    def __init__(self, message_id: str, model: str, answers: Answers) -> None:
        self._answers = answers
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._blocks = Blocks()
        self._last = Update()

    def whole(self, choices: Sequence[Update]) -> dict[str, Any]:
        blocks = blocks_of(choices[0].deltas)
        content = [_block(block) for block in blocks.all]
        return {**self._head, "content": content, **_ending(choices[0], blocks), "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        usage = self._answers.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }

    def begin(self) -> bytes:
        message = {**self._head, "content": [], **_ending(Update(), self._blocks), "usage": self._usage()}
        return _event("message_start", message=message)

    def update(self, index: int, update: Update) -> bytes:
        self._last = update
        return b"".join(map(_change, self._blocks.push(update.deltas)))

    def end(self) -> bytes:
        last = b"".join(map(_change, self._blocks.finish()))
        delta = _ending(self._last, self._blocks)
        return last + _event("message_delta", delta=delta, usage=self._usage()) + _event("message_stop")

    def error(self, error: ApiError) -> bytes:
        return _event("error", error=error_body(error)["error"])


def _event(kind: str, **data: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode({"type": kind, **data}) + b"\n\n"


def _change(change: tuple[Change, Block, str]) -> bytes:
    what, block, text = change
    match what:
        case Change.START:
            empty: dict[str, Any] = _block(block) | ({"input": {}} if block.kind is Kind.CALL else {})
            return _event("content_block_start", index=block.index, content_block=empty)
        case Change.MORE:
            return _event("content_block_delta", index=block.index, delta=_more(block, text))
        case Change.STOP:
            return _event("content_block_stop", index=block.index)


def _more(block: Block, text: str) -> dict[str, Any]:
    match block.kind:
        case Kind.TEXT:
            return {"type": "text_delta", "text": text}
        case Kind.REASONING:
            return {"type": "thinking_delta", "thinking": text}
        case Kind.CALL:
            return {"type": "input_json_delta", "partial_json": text}


def _block(block: Block) -> dict[str, Any]:
    match block.kind:
        case Kind.TEXT:
            return {"type": "text", "text": block.text, "citations": None}
        case Kind.REASONING:
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case Kind.CALL:
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": block.arguments}


def _ending(update: Update, blocks: Blocks) -> dict[str, Any]:
    reason, stop = update.finish_reason, update.stop_string
    if reason is not None:
        ended = "tool_use" if blocks.calls else "stop_sequence" if stop is not None else "end_turn"
        reason = "max_tokens" if reason == "length" else ended
    return {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}
