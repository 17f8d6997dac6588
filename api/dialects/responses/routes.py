"""POST /v1/responses and /v1/responses/input_tokens; GET and DELETE of those that were kept"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.bodies.generation import ChatOptions
from api.bodies.schema import described
from api.dialects.responses.bodies import ResponsesRequest
from api.dialects.responses.formatter import ResponsesFormatter
from api.dialects.responses.store import ResponseStore, Stored
from api.errors import bad_request
from api.http.handling import model_of, open_chat, respond, service_of, tenant_of
from api.http.notes import answer_id
from api.http.wire import json_response
from api.prepare.job import Kind, Prepared
from api.prepare.prompts import TOKEN_BYTES


def router() -> APIRouter:
    routes, kept = APIRouter(), ResponseStore()

    async def prepared_of(request: Request) -> Prepared:
        tenant = tenant_of(request).name

        def history(response_id: str) -> bytes:
            return kept.find(tenant, response_id, "previous_response_id").messages

        return await service_of(request).prepare(Kind.RESPONSES, request, history)

    @routes.post("/v1/responses", openapi_extra=described(ResponsesRequest))
    async def create_response(request: Request) -> Response:
        service, tenant = service_of(request), tenant_of(request)
        prepared = await prepared_of(request)
        body, answers = await open_chat(request, prepared)
        head = _head(msgspec.json.decode(prepared.head), answer_id(request, "resp_", None), model_of(request, body))

        def keep(written: dict[str, Any], message: dict[str, Any]) -> None:
            messages = [*msgspec.json.decode(prepared.messages), message]
            stored = Stored(tenant.name, msgspec.json.encode(written), msgspec.json.encode(messages))
            kept.keep(head["id"], stored)

        formatter = ResponsesFormatter(head, answers, service.tokenizer, keep if head["store"] else None)
        return await respond(request, answers, formatter, stream=body.stream)

    @routes.post("/v1/responses/input_tokens", openapi_extra=described(ResponsesRequest))
    async def count_tokens(request: Request) -> Response:
        service, tenant = service_of(request), tenant_of(request)
        prepared = await prepared_of(request)
        service.adapter(tenant, ChatOptions.model_validate_json(prepared.options).model)
        counted = len(prepared.prompts[0]) // TOKEN_BYTES
        return json_response({"object": "response.input_tokens", "input_tokens": counted})

    @routes.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(request: Request, response_id: str) -> Response:
        kept.find(tenant_of(request).name, response_id)
        raise bad_request("Cannot cancel a synchronous response.", "response_id")

    @routes.get("/v1/responses/{response_id}")
    async def get_response(request: Request, response_id: str) -> Response:
        stored = kept.find(tenant_of(request).name, response_id)
        return Response(stored.body, media_type="application/json")

    @routes.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Response:
        kept.delete(tenant_of(request).name, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    return routes


def _head(asked: dict[str, Any], response_id: str, model: str) -> dict[str, Any]:
    """What a response says beside its output: what was asked, and what everybody gets."""
    return {
        **asked,
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "background": False,
        "truncation": "disabled",
    }
