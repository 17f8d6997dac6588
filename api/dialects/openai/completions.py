"""POST /v1/completions"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.bodies.generation import CompletionOptions, CompletionRequest
from api.bodies.schema import described
from api.dialects.common.logprobs import completion_logprobs, prompt_logprobs
from api.http.answers.generation import Answers, Update
from api.http.answers.streaming import ResponseFormatter, event
from api.http.fast.template import EventTemplate
from api.http.handling import head_of, respond, service_of, tenant_of
from api.prepare.job import Kind
from api.prepare.prompts import unpacked
from api.text.deltas import Text
from api.text.tokenizer import Tokenizer
from engine.errors import EngineError
from engine.messages import TokenLogprobs


def router() -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", openapi_extra=described(CompletionRequest))
    async def completions(request: Request) -> Response:
        service, tenant = service_of(request), tenant_of(request)
        prepared = await service.prepare(Kind.COMPLETION, request)
        body = CompletionOptions.model_validate_json(prepared.options)
        adapter = service.adapter(tenant, body.model)
        prompts = [unpacked(data) for data in prepared.prompts]
        answers = await service.submit(body, tenant, adapter, prompts, prepared)
        head = {"object": "text_completion", **head_of(request, body, "cmpl-")}
        formatter = CompletionFormatter(service.tokenizer, body, prompts, prepared.texts, answers, head)
        return await respond(request, answers, formatter, stream=body.stream)

    return routes


class CompletionFormatter(ResponseFormatter):
    def __init__(
        self,
        tokenizer: Tokenizer | None,
        body: CompletionOptions,
        prompts: list[list[int]],
        texts: list[str],
        answers: Answers,
        head: dict[str, Any],
    ) -> None:
        self._tokenizer = tokenizer
        self._names = None if body.return_tokens_as_token_ids else tokenizer
        self._body = body
        self._prompts = prompts
        self._texts = texts
        self._answers = answers
        self._begun: set[int] = set()
        options = body.stream_options
        self._with_usage = options is not None and options.include_usage
        self._usage_so_far = self._with_usage and options is not None and options.continuous_usage_stats
        self._head = head
        more = body.echo or body.return_token_ids or body.logprobs is not None or body.prompt_logprobs is not None
        self._text_alone = not (more or self._usage_so_far)
        self._template = EventTemplate()

    def whole(self, choices: Sequence[Update]) -> dict[str, Any]:
        written = [self._choice(index, choice, first=True) for index, choice in enumerate(self._best(choices))]
        return {**self._head, "choices": written, "usage": self._answers.usage()}

    def _best(self, choices: Sequence[Update]) -> Sequence[Update]:
        """Of the candidates for each prompt, the n with the highest mean log-probability."""
        count, kept = self._body.candidates, self._body.n
        if count == kept:
            return choices
        groups = [choices[start : start + count] for start in range(0, len(choices), count)]
        return [choice for group in groups for choice in sorted(group, key=_mean_logprob, reverse=True)[:kept]]

    def _choice(self, index: int, update: Update, *, first: bool) -> dict[str, Any]:
        """`first`: the prompt's part belongs to it too."""
        prompt, echoed = self._prompts[index // self._body.n], ""
        choice: dict[str, Any] = {"index": index}
        if self._body.echo:
            echoed = self._texts[index // self._body.n]
        if self._body.return_token_ids:
            choice["token_ids"] = update.tokens
            if first:
                choice["prompt_token_ids"] = prompt
        choice["text"] = (echoed if first else "") + update.text
        choice["logprobs"] = self._logprobs(update, prompt if first and self._body.echo else [], len(echoed))
        choice["finish_reason"] = update.finish_reason
        if update.finish_reason is not None:
            choice["matched_stop"] = update.matched_stop
        if first and (wanted := self._body.prompt_logprobs) is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._names, prompt, update.prompt_logprobs, wanted)
        if update.finish_reason is not None and self._body.max_tokens == 0:
            choice["finish_reason"] = "length"
        return choice

    def _logprobs(self, update: Update, prompt: list[int], shift: int) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        if prompt and (update.prompt_logprobs is None or len(update.prompt_logprobs) != len(prompt)):
            raise EngineError("the engine did not send the prompt's log-probabilities")
        echoed = [_narrowed(entry, self._body.logprobs) for entry in update.prompt_logprobs or ()] if prompt else []
        entries = [*echoed, *(update.logprobs or [])]
        offsets = [*self._prompt_offsets(prompt), *(shift + offset for offset in update.offsets)]
        return completion_logprobs(self._names, [*prompt, *update.tokens], entries, offsets)

    def _prompt_offsets(self, prompt: list[int]) -> list[int]:
        if self._tokenizer is None:
            return [0] * len(prompt)
        text, offsets, length = self._tokenizer.detokenizer(skip_special_tokens=False), [], 0
        for token in prompt:
            offsets.append(length)
            length += len(text.push(token))
        return offsets

    def _chunk(self, *choices: dict[str, Any], **more: Any) -> bytes:
        usage: dict[str, Any] = {"usage": None} if self._with_usage else {}
        if self._usage_so_far:
            usage = {"usage": self._answers.usage()}
        return event({**self._head, **usage, "choices": choices, **more})

    def _text_event(self, index: int, text: str) -> bytes:
        return self._chunk(self._choice(index, Update([Text(text)]), first=False))

    def update(self, index: int, update: Update) -> bytes:
        if self._text_alone and update.finish_reason is None:
            return self._template.event(index, text, self._text_event) if (text := update.text) else b""
        first = index not in self._begun
        self._begun.add(index)
        visible = update.text or update.logprobs or update.finish_reason or (first and self._body.echo)
        if visible or (self._body.return_token_ids and (update.tokens or first)):
            return self._chunk(self._choice(index, update, first=first))
        return b""

    def end(self) -> bytes:
        return self._chunk(usage=self._answers.usage()) if self._with_usage else b""


def _mean_logprob(update: Update) -> float:
    logprobs = [entry.chosen.logprob for entry in update.logprobs or ()]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf


def _narrowed(entry: TokenLogprobs | None, count: int) -> TokenLogprobs | None:
    """`prompt_logprobs` may have asked for more alternatives than `logprobs`."""
    return entry and TokenLogprobs(entry.chosen, entry.top[:count])
