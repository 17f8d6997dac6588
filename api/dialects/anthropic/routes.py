"""POST /v1/messages and /v1/messages/count_tokens, and Anthropic's form of answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.bodies.generation import ChatOptions
from api.bodies.schema import described
from api.dialects.anthropic.requests import MessagesRequest
from api.dialects.common.blocks import Block, BlockKind, Blocks, Change, blocks_of
from api.errors import ApiError, TooLongError
from api.http.answers.generation import Answers, Update
from api.http.answers.streaming import ResponseFormatter
from api.http.handling import model_of, open_chat, respond, service_of, tenant_of
from api.http.middleware import answer_id
from api.http.wire import json_response
from api.prepare.job import Kind
from api.prepare.prompts import TOKEN_BYTES

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def router() -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/messages", openapi_extra=described(MessagesRequest))
    async def create_message(request: Request) -> Response:
        tenant_of(request)
        prepared = await service_of(request).prepare(Kind.MESSAGES, request)
        body, answers = await open_chat(request, prepared)
        formatter = MessagesFormatter(answer_id(request, "msg_", None), model_of(request, body), answers)
        return await respond(request, answers, formatter, stream=body.stream)

    @routes.post("/v1/messages/count_tokens", openapi_extra=described(MessagesRequest))
    async def count_tokens(request: Request) -> Response:
        service, tenant = service_of(request), tenant_of(request)
        prepared = await service.prepare(Kind.MESSAGES, request)
        service.adapter(tenant, ChatOptions.model_validate_json(prepared.options).model)
        return json_response({"input_tokens": len(prepared.prompts[0]) // TOKEN_BYTES})

    return routes


def error_body(error: ApiError) -> dict[str, Any]:
    message = _too_long(error) if isinstance(error, TooLongError) else error.message
    return {"type": "error", "error": {"type": _ERRORS.get(error.status, "api_error"), "message": message}}


def _too_long(error: TooLongError) -> str:
    """The two sentences by which Anthropic's clients lower `max_tokens` or compact their history."""
    prompt, output, limit = error.prompt_tokens, error.output_tokens, error.limit
    if output is None:
        return f"prompt is too long: {prompt} tokens > {min(limit, prompt - 1)} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {output} > {limit}, "
        "decrease input length or `max_tokens` and try again"
    )


class MessagesFormatter(ResponseFormatter):
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
            empty: dict[str, Any] = _block(block) | ({"input": {}} if block.kind is BlockKind.CALL else {})
            return _event("content_block_start", index=block.index, content_block=empty)
        case Change.MORE:
            return _event("content_block_delta", index=block.index, delta=_more(block, text))
        case Change.STOP:
            return _event("content_block_stop", index=block.index)


def _more(block: Block, text: str) -> dict[str, Any]:
    match block.kind:
        case BlockKind.TEXT:
            return {"type": "text_delta", "text": text}
        case BlockKind.REASONING:
            return {"type": "thinking_delta", "thinking": text}
        case BlockKind.CALL:
            return {"type": "input_json_delta", "partial_json": text}


def _block(block: Block) -> dict[str, Any]:
    match block.kind:
        case BlockKind.TEXT:
            return {"type": "text", "text": block.text}
        case BlockKind.REASONING:
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case BlockKind.CALL:
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": block.arguments}


def _ending(update: Update, blocks: Blocks) -> dict[str, Any]:
    reason, stop = update.finish_reason, update.stop_string
    if reason is not None:
        ended = "tool_use" if blocks.calls else "stop_sequence" if stop is not None else "end_turn"
        reason = "max_tokens" if reason == "length" else ended
    return {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}
