"""What the routes share: who asks, which service, and how answers are given."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from api.bodies.generation import ChatOptions, CompletionOptions
from api.http.answers.generation import Answers
from api.http.answers.streaming import ResponseFormatter
from api.http.fast import delivery
from api.http.middleware import answer_id, caller_of
from api.http.service import Service
from api.http.wire import json_response, until_gone
from api.prepare.job import Prepared
from api.prepare.prompts import unpacked
from api.tenants.keys import authorization_of
from api.tenants.record import Tenant

_PATIENCE_S = 10.0  # how long a stream's status line waits for the engine's first word


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def tenant_of(request: Request) -> Tenant:
    """Who asks. Raises ApiError 401."""
    return caller_of(request.scope)


def check_admin(request: Request, what: str = "loading and unloading adapters") -> None:
    """Raises ApiError 401 or 403."""
    service_of(request).keys.check_admin(authorization_of(request.headers), what)


def model_of(request: Request, body: ChatOptions | CompletionOptions) -> str:
    """The model's name as an answer gives it."""
    return body.model or tenant_of(request).default_model or service_of(request).ready.model_name


def head_of(request: Request, body: ChatOptions | CompletionOptions, prefix: str) -> dict[str, Any]:
    """What an answer and each of its chunks begin with."""
    answer = answer_id(request, prefix, body.request_id)
    return {"id": answer, "created": int(time.time()), "model": model_of(request, body)}


async def open_chat(request: Request, prepared: Prepared) -> tuple[ChatOptions, Answers]:
    """The answers to a chat, whatever form it came in, with its options."""
    service, tenant = service_of(request), tenant_of(request)
    body = ChatOptions.model_validate_json(prepared.options)
    adapter = service.adapter(tenant, body.model)
    prompt = unpacked(prepared.prompts[0])
    return body, await service.submit(body, tenant, adapter, [prompt], prepared)


async def respond(request: Request, answers: Answers, formatter: ResponseFormatter, *, stream: bool) -> Response:
    """The answers as `formatter` writes them; aborted if the client goes. An error before anything has come decides
    the HTTP status, of a stream too, unless it is long in coming: in a long queue a stream begins without an answer."""
    try:
        if stream:
            await until_gone(request.scope, request.receive, answers.begun(_PATIENCE_S))
            return delivery.ChunkStream(answers, formatter)
        return json_response(formatter.whole(await until_gone(request.scope, request.receive, delivery.whole(answers))))
    except BaseException:
        answers.abort()
        raise
