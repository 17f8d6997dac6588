"""/v1/files"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from api.batches.service import PURPOSES, Batches
from api.batches.store import Store
from api.errors import ApiError, bad_request, shortened
from api.http.handling import service_of, tenant_of
from api.http.wire import ClientGoneError, check_encoding, json_response

_MOST = 10_000
_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "additionalProperties": False,
                    "dependentRequired": {
                        "expires_after[anchor]": ["expires_after[seconds]"],
                        "expires_after[seconds]": ["expires_after[anchor]"],
                    },
                    "properties": {
                        "file": {
                            "type": "string",
                            "format": "binary",
                            "description": "a line of JSON for each request",
                        },
                        "purpose": {"enum": list(PURPOSES)},
                        "expires_after[anchor]": {"const": "created_at"},
                        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
                    },
                }
            }
        },
    }
}


def batches_of(request: Request) -> Batches:
    """Raises ApiError 404 on a server without --data-dir."""
    batches = service_of(request).batches
    if batches is None:
        raise ApiError(404, "files and batches are off: start the server with --data-dir DIR", code="no_data_dir")
    return batches


def router() -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/files", openapi_extra=_FORM)
    async def create(request: Request) -> Response:
        batches, tenant = batches_of(request), tenant_of(request)
        content_type = request.headers.get("content-type", "")
        file = await batches.upload(tenant.name, content_type, _chunks(request))
        return json_response(file.shown())

    @routes.get("/v1/files")
    async def files(request: Request) -> Response:
        batches, tenant = batches_of(request), tenant_of(request)
        after, limit, order, purpose = listing(request, ("after", "limit", "order", "purpose"), _MOST, _MOST)
        if after is not None:
            await batches.file(tenant.name, after)
        newest_first = order != "asc"
        found = await batches.ask(Store.files, tenant.name, after, limit + 1, purpose, newest_first=newest_first)
        return json_response(page([file.shown() for file in found], limit))

    @routes.get("/v1/files/{file_id}")
    async def retrieve(request: Request, file_id: str) -> Response:
        batches, tenant = batches_of(request), tenant_of(request)
        return json_response((await batches.file(tenant.name, file_id)).shown())

    @routes.delete("/v1/files/{file_id}")
    async def delete(request: Request, file_id: str) -> Response:
        batches, tenant = batches_of(request), tenant_of(request)
        await batches.delete_file(tenant.name, file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    @routes.get("/v1/files/{file_id}/content", response_class=FileResponse)
    async def content(request: Request, file_id: str) -> Response:
        batches, tenant = batches_of(request), tenant_of(request)
        file = await batches.file(tenant.name, file_id)
        return FileResponse(batches.path(file.id), media_type="application/jsonl")

    return routes


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    """The body, which must come at a rate of --max-body-bytes in --body-timeout-s."""
    check_encoding(request)
    config = service_of(request).config
    loop = asyncio.get_running_loop()
    began, received = loop.time(), 0
    stream = request.stream()
    while True:
        allowed_s = config.body_timeout_s * (1 + received / config.max_body_bytes)
        try:
            chunk = await asyncio.wait_for(stream.__anext__(), max(0.0, began + allowed_s - loop.time()))
        except StopAsyncIteration:
            return
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not come within {allowed_s:g} s", code="timeout") from None
        except ClientDisconnect:
            raise ClientGoneError from None
        received += len(chunk)
        yield chunk


def listing(
    request: Request, names: tuple[str, ...], most: int, default: int
) -> tuple[str | None, int, str | None, str | None]:
    """after, limit, order and purpose of a list's query. Raises ApiError."""
    query = request.query_params
    if unknown := sorted(set(query) - set(names)):
        raise bad_request(
            f"unknown query parameter {shortened(unknown[0])}; known: {', '.join(names)}", unknown[0][:100]
        )
    limit, order = query.get("limit", str(default)), query.get("order")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 10 and 1 <= int(limit) <= most):
        raise bad_request(f"limit: 1 to {most} is expected, got {shortened(limit)}", "limit")
    if order not in (None, "asc", "desc"):
        raise bad_request(f"order: 'asc' or 'desc' is expected, got {shortened(order)}", "order")
    return query.get("after"), int(limit), order, query.get("purpose")


def page(items: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A list as OpenAI shows it, of `items`, of which one more than `limit` was looked for."""
    shown = items[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > limit,
    }
