"""/v1/batches"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from api.batches.service import expires_after
from api.batches.store import Store
from api.bodies.body import Body
from api.bodies.parsing import parse
from api.bodies.schema import described
from api.endpoints.files import batches_of, listing, page
from api.http.handling import service_of, tenant_of
from api.http.wire import json_response

_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class BatchRequest(Body):
    SHAPES = {  # noqa: RUF012
        "endpoint": {"enum": ["/v1/chat/completions", "/v1/completions", "/v1/responses"]},
        "completion_window": {"const": "24h"},
        "output_expires_after": {
            "type": "object",
            "required": ["anchor", "seconds"],
            "properties": {
                "anchor": {"const": "created_at"},
                "seconds": {"type": "integer", "minimum": 3600, "maximum": 2592000},
            },
        },
    }

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[_Key, _Value] | None = Field(default=None, max_length=16)
    output_expires_after: dict[str, Any] | None = None


def router() -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/batches", openapi_extra=described(BatchRequest, strict=True))
    async def create(request: Request) -> Response:
        batches, tenant = batches_of(request), tenant_of(request)
        async with service_of(request).small_bodies.read(request) as raw:
            body = parse(BatchRequest, raw)
        expires = body.output_expires_after
        batch = await batches.create(
            tenant.name,
            input_file_id=body.input_file_id,
            endpoint=body.endpoint,
            completion_window=body.completion_window,
            metadata=body.metadata,
            output_expires_after_s=None if expires is None else expires_after(expires, "output_expires_after"),
        )
        return json_response(batch.shown())

    @routes.get("/v1/batches")
    async def list_(request: Request) -> Response:
        batches, tenant = batches_of(request), tenant_of(request)
        after, limit, _, _ = listing(request, ("after", "limit"), 100, 20)
        if after is not None:
            await batches.batch(tenant.name, after)
        found = await batches.ask(Store.batches, tenant.name, after, limit + 1)
        return json_response(page([batch.shown() for batch in found], limit))

    @routes.get("/v1/batches/{batch_id}")
    async def retrieve(request: Request, batch_id: str) -> Response:
        batches, tenant = batches_of(request), tenant_of(request)
        return json_response((await batches.batch(tenant.name, batch_id)).shown())

    @routes.post("/v1/batches/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> Response:
        batches, tenant = batches_of(request), tenant_of(request)
        return json_response((await batches.cancel(tenant.name, batch_id)).shown())

    return routes
