"""POST /v1/chat/completions"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.generation import Answer, Piece, merged
from api.http import EventStream, described, event, json_response, read_body, until_gone
from api.logprobs import chat_logprobs
from api.protocol import ChatRequest, parse
from api.routes.common import abort_all, collect, first_and_rest, service_of, tenant_of
from api.service import Service, usage


def router() -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=described(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        service, tenant = service_of(request), tenant_of(request)
        body = parse(ChatRequest, await read_body(request, service.config.max_body_bytes))
        adapter = service.adapter(tenant, body.model)
        prompt = await service.encode_chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
        )
        service.check_tokens(prompt, "messages")
        answers = service.submit(body, tenant, adapter, [prompt])
        chat = _Chat(service, body, prompt, answers)
        with ExitStack() as stack:
            stack.callback(abort_all, answers)
            if not body.stream:
                return json_response(await until_gone(request.receive, chat.whole()))
            pieces = await until_gone(request.receive, first_and_rest(merged(answers)))
            return EventStream(chat.events(pieces), stack.pop_all().close)

    return routes


class _Chat:
    def __init__(self, service: Service, body: ChatRequest, prompt: list[int], answers: list[Answer]) -> None:
        self._service = service
        self._body = body
        self._prompt = prompt
        self._answers = answers
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}

    async def whole(self) -> dict[str, Any]:
        pieces = await collect(self._answers)
        response: dict[str, Any] = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index, piece) for index, piece in enumerate(pieces)],
            "usage": usage(self._answers, self._body.n),
        }
        if self._body.return_token_ids:
            response["prompt_token_ids"] = self._prompt
        return response

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": piece.text},
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = piece.tokens
        return choice

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if piece.logprobs is None:
            return None
        return chat_logprobs(self._service.tokenizer, piece.logprobs)

    async def events(self, pieces: AsyncIterator[tuple[int, Piece]]) -> AsyncIterator[bytes]:
        options = self._body.stream_options
        with_usage = options is not None and options.include_usage
        head: dict[str, Any] = {**self._head, "object": "chat.completion.chunk"}
        if with_usage:
            head["usage"] = None
        for index in range(self._body.n):
            first: dict[str, Any] = {**head, "choices": [_delta(index, {"role": "assistant", "content": ""})]}
            if self._body.return_token_ids:
                first["prompt_token_ids"] = self._prompt
            yield event(first)
        async for index, piece in pieces:
            ids = self._body.return_token_ids and piece.tokens
            if piece.text or piece.logprobs or ids:
                choice = _delta(index, {"content": piece.text}, self._logprobs(piece))
                if ids:
                    choice["token_ids"] = piece.tokens
                yield event({**head, "choices": [choice]})
            if piece.finish_reason is not None:
                yield event({**head, "choices": [_delta(index, {}, finish_reason=piece.finish_reason)]})
        if with_usage:
            yield event({**head, "choices": [], "usage": usage(self._answers, self._body.n)})


def _delta(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
