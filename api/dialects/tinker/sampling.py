"""Samples for Tinker's clients: token ids and their log-probabilities, the token that ended an answer included."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import msgspec

from api.client.stream import Inbox, OpenRequest
from api.dialects.tinker.wire import Sampled
from api.errors import ApiError, bad_request
from api.http.answers.meter import Meter
from api.http.service import Service
from api.tenants.record import Tenant
from engine import messages as m
from scheduler.request import SamplingParams

_SPARE = 8  # tokens that are looked at behind those that a stop string may take


async def sample(
    service: Service,
    tenant: Tenant,
    adapter: str | None,
    prompt: list[int],
    params: SamplingParams,
    count: int,
    stops: Sequence[str],
) -> list[Sampled]:
    """`count` answers to `prompt`. Raises ApiError or EngineUnavailable."""
    limit = service.ready.max_model_len if tenant.max_context is None else tenant.context(service.ready.max_model_len)
    if not prompt or len(prompt) >= limit:
        raise bad_request(f"prompt: {len(prompt)} tokens; allowed are 1 to {limit - 1}", "prompt")
    params = msgspec.structs.replace(params, max_tokens=min(params.max_tokens, limit - len(prompt)))
    tickets = service.limits.admit(tenant, [(0 if n else len(prompt), params.max_tokens) for n in range(count)])
    inbox, answers = Inbox(), dict[str, _Answer]()
    try:
        for number, ticket in enumerate(tickets):
            seed = None if params.seed is None else (params.seed + number) % 2**63
            only_first = params.prompt_logprobs if number == 0 else None
            message = m.Submit(
                request_id=uuid.uuid4().hex,
                prompt=prompt,
                sampling=msgspec.structs.replace(params, seed=seed, prompt_logprobs=only_first),
                adapter=adapter,
                tenant=tenant.name,
                tenant_weight=tenant.weight,
                max_waiting=tenant.max_waiting(service.client.config.max_queue),
                cache_group=tenant.cache_salt,
                timeout_s=service.config.request_timeout_s,
            )
            meter = Meter(
                service.metrics,
                tenant=tenant.name,
                model=adapter or service.ready.model_name,
                billed_prompt=0 if number else len(prompt),
                ticket=ticket,
                usage=service.usage,
                tracing=service.tracing,
            )
            answers[message.request_id] = _Answer(service.client.submit(message, inbox), meter, len(prompt))
        left = set(answers)
        while left:
            for event in await inbox.take():
                if event.request_id in left and answers[event.request_id].take(event, service, stops):
                    left.remove(event.request_id)
    except BaseException:
        for answer in answers.values():
            answer.abort()
        for ticket in tickets[len(answers) :]:
            ticket.end(ran=False)
        raise
    return [answer.sampled for answer in answers.values()]


class _Answer:
    def __init__(self, request: OpenRequest, meter: Meter, prompt_tokens: int) -> None:
        self.sampled = Sampled(tokens=[], logprobs=[], top=[])
        self._request, self._meter, self._prompt_tokens = request, meter, prompt_tokens
        self._over = False

    def abort(self) -> None:
        if not self._over:
            self._request.abort()
            self._end("cancelled")

    def take(self, event: m.Tokens | m.Finished | m.Refused | m.Cancelled | m.Failed, service: Service,
             stops: Sequence[str]) -> bool:  # fmt: skip
        """Whether the answer has ended. Raises ApiError for one that went wrong."""
        if isinstance(event, m.Tokens):
            return self._tokens(event, service, stops)
        if isinstance(event, m.Finished):
            found = self.sampled
            found.cached_tokens = event.cached_tokens
            found.ended = event.reason == "stop"
            if event.stop_token is not None and event.stop_logprobs is not None:
                found.tokens.append(event.stop_token)
                found.logprobs.append(event.stop_logprobs.chosen.logprob)
            self._end(event.reason)
            return True
        self._end("refused" if isinstance(event, m.Refused) else "failed")
        if isinstance(event, m.Refused):
            raise ApiError(event.status, event.message, param=event.field, code=event.code)
        if isinstance(event, m.Failed):
            raise ApiError(event.status, event.message)
        raise ApiError(503, f"the request was cancelled: {event.reason}")

    def _tokens(self, event: m.Tokens, service: Service, stops: Sequence[str]) -> bool:
        found = self.sampled
        self._meter.delivered(len(event.tokens), event.queued_s)
        found.cached_tokens = event.cached_tokens or found.cached_tokens
        if event.prompt_logprobs is not None:
            known = event.prompt_logprobs
            found.prompt_logprobs = [float("nan") if each is None else each.chosen.logprob for each in known]
            found.top = [[] if each is None else [(t.token, t.logprob) for t in each.top] for each in known]
        for token, entry in zip(event.tokens, event.logprobs or (), strict=True):
            found.tokens.append(token)
            found.logprobs.append(entry.chosen.logprob)
            if stops and self._stopped(service, stops):
                found.ended = True
                self._request.stop(len(found.tokens))
                self._end("stop")
                return True
        return False

    def _stopped(self, service: Service, stops: Sequence[str]) -> bool:
        tokenizer = service.tokenizer
        if tokenizer is None:
            raise bad_request("stop: the server runs without a tokenizer: give token ids", "stop")
        longest = max(len(stop.encode()) for stop in stops) + _SPARE
        text = tokenizer.decode(self.sampled.tokens[-longest:], skip_special_tokens=False)
        return any(stop in text for stop in stops)

    def _end(self, outcome: str) -> None:
        self._over = True
        found = self.sampled
        self._meter.ended(
            outcome,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=found.cached_tokens,
            output_tokens=len(found.tokens),
        )
