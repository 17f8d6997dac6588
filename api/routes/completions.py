"""POST /v1/completions"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.errors import bad_request
from api.generation import Answer, Piece, merged
from api.http import EventStream, described, event, json_response, read_body, until_gone
from api.logprobs import completion_logprobs
from api.protocol import MAX_CHOICES, CompletionRequest, parse
from api.routes.common import abort_all, collect, first_and_rest, service_of, tenant_of
from api.service import Service, usage
from engine.errors import EngineError


def router() -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", openapi_extra=described(CompletionRequest))
    async def completions(request: Request) -> Response:
        service, tenant = service_of(request), tenant_of(request)
        body = parse(CompletionRequest, await read_body(request, service.config.max_body_bytes))
        adapter = service.adapter(tenant, body.model)
        prompts, texts = await _prompts(service, body)
        answers = service.submit(body, tenant, adapter, prompts)
        completion = _Completion(service, body, prompts, texts, answers)
        with ExitStack() as stack:
            stack.callback(abort_all, answers)
            if not body.stream:
                return json_response(await until_gone(request.receive, completion.whole()))
            pieces = await until_gone(request.receive, first_and_rest(merged(answers)))
            return EventStream(completion.events(pieces), stack.pop_all().close)

    return routes


async def _prompts(service: Service, body: CompletionRequest) -> tuple[list[list[int]], list[str]]:
    """The prompts as token ids, and as text for `echo`."""
    given: list[Any] = [body.prompt] if isinstance(body.prompt, str) else list(body.prompt)
    if given and isinstance(given[0], int):
        given = [given]
    if not given:
        raise bad_request("prompt: the list is empty", "prompt")
    if len(given) * body.n > MAX_CHOICES:
        raise bad_request(f"prompt: {len(given)} prompts with n {body.n} are more than {MAX_CHOICES} answers", "prompt")
    prompts, texts = [], []
    for prompt in given:
        if isinstance(prompt, str):
            tokens = await service.encode(prompt, add_special_tokens=True, param="prompt")
        else:
            tokens = prompt
        service.check_tokens(tokens, "prompt")
        prompts.append(tokens)
        exact = isinstance(prompt, str) and body.logprobs is None  # offsets are those of the tokens' text
        if exact or not body.echo or service.tokenizer is None:
            texts.append(prompt if isinstance(prompt, str) else "")
        else:
            texts.append(service.tokenizer.decode(tokens, skip_special_tokens=False))
    return prompts, texts


class _Completion:
    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        prompts: list[list[int]],
        texts: list[str],
        answers: list[Answer],
    ) -> None:
        self._tokenizer = service.tokenizer
        self._body = body
        self._prompts = prompts
        self._texts = texts
        self._answers = answers
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
        }

    async def whole(self) -> dict[str, Any]:
        pieces = await collect(self._answers)
        choices = [self._choice(index, piece, first=True) for index, piece in enumerate(pieces)]
        return {**self._head, "choices": choices, "usage": usage(self._answers, self._body.n)}

    def _choice(self, index: int, piece: Piece, *, first: bool) -> dict[str, Any]:
        """`first`: the prompt's part belongs to it too."""
        prompt, echoed = self._prompts[index // self._body.n], ""
        choice: dict[str, Any] = {"index": index}
        if self._body.echo:
            echoed = self._texts[index // self._body.n]
        if self._body.return_token_ids:
            choice["token_ids"] = piece.tokens
            if first:
                choice["prompt_token_ids"] = prompt
        choice["text"] = (echoed if first else "") + piece.text
        choice["logprobs"] = self._logprobs(piece, prompt if first and self._body.echo else [], len(echoed))
        choice["finish_reason"] = piece.finish_reason
        if piece.finish_reason is not None and self._body.max_tokens == 0:
            choice["finish_reason"] = "length"
        return choice

    def _logprobs(self, piece: Piece, prompt: list[int], shift: int) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        if prompt and (piece.prompt_logprobs is None or len(piece.prompt_logprobs) != len(prompt)):
            raise EngineError("the engine did not send the prompt's log-probabilities")
        entries = [*((piece.prompt_logprobs or []) if prompt else []), *(piece.logprobs or [])]
        offsets = [*self._prompt_offsets(prompt), *(shift + offset for offset in piece.offsets)]
        return completion_logprobs(self._tokenizer, [*prompt, *piece.tokens], entries, offsets)

    def _prompt_offsets(self, prompt: list[int]) -> list[int]:
        if self._tokenizer is None:
            return [0] * len(prompt)
        text, offsets, length = self._tokenizer.detokenizer(skip_special_tokens=False), [], 0
        for token in prompt:
            offsets.append(length)
            length += len(text.push(token))
        return offsets

    async def events(self, pieces: AsyncIterator[tuple[int, Piece]]) -> AsyncIterator[bytes]:
        options = self._body.stream_options
        with_usage = options is not None and options.include_usage
        head: dict[str, Any] = {**self._head}
        if with_usage:
            head["usage"] = None
        begun: set[int] = set()
        async for index, piece in pieces:
            first = index not in begun
            begun.add(index)
            visible = piece.text or piece.logprobs or piece.finish_reason or (first and self._body.echo)
            if visible or (self._body.return_token_ids and (piece.tokens or first)):
                yield event({**head, "choices": [self._choice(index, piece, first=first)]})
        if with_usage:
            yield event({**head, "choices": [], "usage": usage(self._answers, self._body.n)})
