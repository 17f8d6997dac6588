"""GET /v1/models, and loading and unloading adapters."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.errors import ApiError
from api.http import described, json_response, read_body
from api.protocol import LoadAdapterRequest, UnloadAdapterRequest, parse
from api.routes.common import service_of, tenant_of


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models(request: Request) -> Response:
        service, tenant = service_of(request), tenant_of(request)
        return json_response({"object": "list", "data": service.models(tenant)})

    @routes.get("/v1/models/{model:path}")
    async def model(request: Request, model: str) -> Response:
        service, tenant = service_of(request), tenant_of(request)
        service.adapter(tenant, model)
        return json_response(next(entry for entry in service.models(tenant) if entry["id"] == model))

    @routes.post("/v1/load_lora_adapter", openapi_extra=described(LoadAdapterRequest))
    async def load_lora_adapter(request: Request) -> Response:
        service = service_of(request)
        service.keys.check_admin(request.headers.get("authorization"))
        body = parse(LoadAdapterRequest, await read_body(request, service.config.max_body_bytes))
        if body.lora_name == service.ready.model_name:
            raise ApiError(400, f"{body.lora_name!r} is the base model's name", param="lora_name")
        info = await service.client.load_adapter(
            body.lora_name, body.lora_path, replace=body.replace, expert_scaling=body.expert_scaling
        )
        return json_response(
            {
                "object": "adapter",
                "id": info.name,
                "path": info.path,
                "version": info.version,
                "format": info.format,
                "rank": info.rank,
                "num_bytes": info.num_bytes,
                "warnings": info.warnings,
            }
        )

    @routes.post("/v1/unload_lora_adapter", openapi_extra=described(UnloadAdapterRequest))
    async def unload_lora_adapter(request: Request) -> Response:
        service = service_of(request)
        service.keys.check_admin(request.headers.get("authorization"))
        body = parse(UnloadAdapterRequest, await read_body(request, service.config.max_body_bytes))
        if body.lora_name not in service.client.adapters:
            names = ", ".join(map(repr, service.client.adapters)) or "none"
            raise ApiError(
                404,
                f"no adapter {body.lora_name!r} is loaded; loaded: {names}",
                param="lora_name",
                code="adapter_not_found",
            )
        await service.client.unload_adapter(body.lora_name)
        return json_response({"object": "adapter", "id": body.lora_name, "unloaded": True})

    return routes
