"""POST /v1/chat/completions"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.http.answers.generation import Answers, Update
from api.http.answers.logprobs import chat_logprobs, prompt_logprobs
from api.http.answers.streaming import Front, event
from api.http.bodies.generation import ChatOptions, ChatRequest
from api.http.openapi import described
from api.http.routes.common import head_of, open_chat, respond, service_of, tenant_of
from api.prepare.job import Kind
from api.prepare.prompts import unpacked
from api.text.deltas import Delta, Reasoning, Text, ToolArguments, ToolStart, calls_of, reasoning_of
from api.text.tokenizer import Tokenizer


def router() -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=described(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        service, _ = service_of(request), tenant_of(request)
        prepared = await service.prepare(Kind.CHAT, request)
        body, answers = await open_chat(request, prepared)
        prompt, head = unpacked(prepared.prompts[0]), head_of(request, body, "chatcmpl-")
        functions = prepared.reading is not None and prepared.reading.functions
        front = _Chat(service.tokenizer, body, prompt, answers, head, functions=functions)
        return await respond(request, answers, front, stream=body.stream)

    return routes


class _Chat(Front):
    def __init__(
        self,
        tokenizer: Tokenizer | None,
        body: ChatOptions,
        prompt: list[int],
        answers: Answers,
        head: dict[str, Any],
        *,
        functions: bool = False,
    ) -> None:
        self._names = None if body.return_tokens_as_token_ids else tokenizer
        self._body = body
        self._prompt = prompt
        self._answers = answers
        options = body.stream_options
        self._with_usage = options is not None and options.include_usage
        self._usage_so_far = options is not None and options.continuous_usage_stats
        self._head = head
        self._functions = functions

    def whole(self, choices: Sequence[Update]) -> dict[str, Any]:
        response: dict[str, Any] = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": self._answers.usage(),
        }
        if self._body.return_token_ids:
            response["prompt_token_ids"] = self._prompt
        if (wanted := self._body.prompt_logprobs) is not None:
            entries = choices[0].prompt_logprobs
            response["prompt_logprobs"] = prompt_logprobs(self._names, self._prompt, entries, wanted)
        return response

    def _choice(self, index: int, update: Update) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "message": _message(update, functions=self._functions),
            "logprobs": self._logprobs(update),
            "finish_reason": self._reason(update),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = update.tokens
        return choice

    def _logprobs(self, update: Update) -> dict[str, Any] | None:
        return None if update.logprobs is None else chat_logprobs(self._names, update.logprobs)

    def _chunk(self, *choices: dict[str, Any], **more: Any) -> bytes:
        usage: dict[str, Any] = {"usage": None} if self._with_usage else {}
        if self._usage_so_far:
            usage = {"usage": self._answers.usage()}
        return event({**self._head, "object": "chat.completion.chunk", **usage, "choices": choices, **more})

    def begin(self) -> bytes:
        more = {"prompt_token_ids": self._prompt} if self._body.return_token_ids else {}
        first = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(_delta(index, first), **more) for index in range(self._body.n))

    def update(self, index: int, update: Update) -> bytes:
        written = b""
        ids = self._body.return_token_ids and update.tokens
        deltas = [_shown(delta, functions=self._functions) for delta in update.deltas]
        if not deltas and (update.logprobs or ids):
            deltas = [{"content": ""}]
        for number, delta in enumerate(deltas):
            choice = _delta(index, delta, None if number else self._logprobs(update))
            if ids and not number:
                choice["token_ids"] = update.tokens
            written += self._chunk(choice)
        if update.finish_reason is not None:
            written += self._chunk(_delta(index, {}, finish_reason=self._reason(update)))
        return written

    def _reason(self, update: Update) -> str | None:
        called = self._functions and update.finish_reason == "tool_calls"
        return "function_call" if called else update.finish_reason

    def end(self) -> bytes:
        return self._chunk(usage=self._answers.usage()) if self._with_usage else b""


def _delta(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _shown(delta: Delta, *, functions: bool) -> dict[str, Any]:
    """`functions`: calls in their older form."""
    match delta:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case ToolStart(_, _, name) if functions:
            return {"function_call": {"name": name, "arguments": ""}}
        case ToolArguments(_, text) if functions:
            return {"function_call": {"arguments": text}}
        case ToolStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ToolArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _message(update: Update, *, functions: bool) -> dict[str, Any]:
    """A whole answer. Without text its content is null if there are calls."""
    calls = calls_of(update.deltas)
    message: dict[str, Any] = {"role": "assistant", "content": update.text or (None if calls else "")}
    if reasoning := reasoning_of(update.deltas):
        message["reasoning_content"] = reasoning
    made = [{"name": call.name, "arguments": call.arguments} for call in calls]
    if functions and made:
        message["function_call"] = made[0]
    elif made:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(calls, made, strict=True)
        ]
    return message
