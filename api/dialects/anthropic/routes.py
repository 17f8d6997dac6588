"""POST /v1/messages and /v1/messages/count_tokens"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.bodies.generation import ChatOptions
from api.bodies.schema import described
from api.dialects.anthropic.bodies import MessagesRequest
from api.dialects.anthropic.formatter import MessagesFormatter
from api.http.handling import model_of, open_chat, respond, service_of, tenant_of
from api.http.notes import answer_id
from api.http.wire import json_response
from api.prepare.job import Kind
from api.prepare.prompts import TOKEN_BYTES


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
