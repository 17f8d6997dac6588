"""POST /v1/chat/completions"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.bodies.generation import ChatOptions, ChatRequest
from api.bodies.schema import described
from api.dialects.common.logprobs import chat_logprobs, prompt_logprobs
from api.dialects.openai.calls import WrittenCalls
from api.http.answers.generation import Answers, Update
from api.http.answers.streaming import ResponseFormatter, event
from api.http.fast.template import EventTemplate
from api.http.handling import head_of, open_chat, respond, service_of, tenant_of
from api.prepare.job import Kind
from api.prepare.prompts import unpacked
from api.text.deltas import Delta, Reasoning, Text, calls_of, reasoning_of
from api.text.tokenizer import Tokenizer


def router() -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=described(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        service, _ = service_of(request), tenant_of(request)
        prepared = await service.prepare(Kind.CHAT, request)
        body, answers = await open_chat(request, prepared)
        prompt, head = unpacked(prepared.prompts[0]), head_of(request, body, "chatcmpl-")
        reading, echoed = prepared.reading, "".join(prepared.texts)
        calls = WrittenCalls() if reading is None else WrittenCalls(functions=reading.functions, free=reading.free)
        formatter = ChatFormatter(service.tokenizer, body, prompt, answers, head, echoed, calls)
        return await respond(request, answers, formatter, stream=body.stream)

    return routes


class ChatFormatter(ResponseFormatter):
    def __init__(
        self,
        tokenizer: Tokenizer | None,
        body: ChatOptions,
        prompt: list[int],
        answers: Answers,
        head: dict[str, Any],
        echoed: str = "",
        calls: WrittenCalls | None = None,
    ) -> None:
        self._names = None if body.return_tokens_as_token_ids else tokenizer
        self._body = body
        self._prompt = prompt
        self._answers = answers
        options = body.stream_options
        self._with_usage = options is not None and options.include_usage
        self._usage_so_far = self._with_usage and options is not None and options.continuous_usage_stats
        self._head = head
        self._echoed = echoed
        self._calls = calls or WrittenCalls()
        self._texts, self._reasonings = EventTemplate(), EventTemplate()

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
        message = _message(update, self._calls)
        if self._echoed:
            message["content"] = self._echoed + (message["content"] or "")
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(update),
            "finish_reason": self._reason(update),
            "matched_stop": update.matched_stop,
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
        more: dict[str, Any] = {"prompt_token_ids": self._prompt} if self._body.return_token_ids else {}
        if self._usage_so_far:  # tokens may have come, but no event has told of them
            more["usage"] = self._answers.usage(told=False)
        first = {"role": "assistant", "content": self._echoed}
        return b"".join(self._chunk(_delta(index, first), **more) for index in range(self._body.n))

    def update(self, index: int, update: Update) -> bytes:
        """The last part of a text comes with the finish reason; a call's has an event of its own, as OpenAI's."""
        ids = self._body.return_token_ids and update.tokens
        ended = update.finish_reason is not None
        if not (ended or ids or update.logprobs is not None or self._usage_so_far):
            return b"".join(self._event(index, delta) for delta in update.deltas)
        deltas = [self._shown(index, delta) for delta in update.deltas]
        if ended and deltas and "content" not in deltas[-1]:
            deltas.append({})
        elif not deltas and (ended or update.logprobs or ids):
            deltas = [{} if update.finish_reason == "tool_calls" else {"content": ""}]
        choices = [_delta(index, delta) for delta in deltas]
        if choices:
            choices[0]["logprobs"] = self._logprobs(update)
            choices[-1]["finish_reason"] = self._reason(update)
            if ended:
                choices[-1]["matched_stop"] = update.matched_stop
            if ids:
                choices[0]["token_ids"] = update.tokens
        return b"".join(map(self._chunk, choices))

    def _event(self, index: int, delta: Delta) -> bytes:
        if isinstance(delta, Text):
            return self._texts.event(index, delta.text, self._text)
        if isinstance(delta, Reasoning):
            return self._reasonings.event(index, delta.text, self._reasoning)
        return self._chunk(_delta(index, self._shown(index, delta)))

    def _shown(self, choice: int, delta: Delta) -> dict[str, Any]:
        match delta:
            case Text(text):
                return {"content": text}
            case Reasoning(text):
                return _reasoning(text)
            case _:
                return self._calls.delta(choice, delta)

    def _text(self, index: int, text: str) -> bytes:
        return self._chunk(_delta(index, {"content": text}))

    def _reasoning(self, index: int, text: str) -> bytes:
        return self._chunk(_delta(index, _reasoning(text)))

    def _reason(self, update: Update) -> str | None:
        called = self._calls.functions and update.finish_reason == "tool_calls"
        return "function_call" if called else update.finish_reason

    def end(self) -> bytes:
        return self._chunk(usage=self._answers.usage()) if self._with_usage else b""


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _reasoning(text: str) -> dict[str, Any]:
    """Under both names that clients look for."""
    return {"reasoning_content": text, "reasoning": text}


def _message(update: Update, written: WrittenCalls) -> dict[str, Any]:
    """A whole answer. Without text its content is null if there are calls."""
    calls = calls_of(update.deltas)
    message: dict[str, Any] = {"role": "assistant", "content": update.text or (None if calls else "")}
    if reasoning := reasoning_of(update.deltas):
        message |= _reasoning(reasoning)
    return message | written.whole(calls)
