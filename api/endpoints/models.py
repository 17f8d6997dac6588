"""GET /v1/models, and loading and unloading adapters."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from api.bodies.body import Body
from api.bodies.parsing import parse, why_no_json
from api.bodies.schema import described
from api.config import ServeConfig
from api.errors import ApiError, bad_request
from api.http.handling import check_admin, service_of, tenant_of
from api.http.service import Service
from api.http.wire import json_response
from engine import messages as m


class LoadAdapterRequest(Body):
    lora_name: Annotated[str, Field(min_length=1, max_length=200)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    replace: bool = False
    load_inplace: bool = False  # vLLM's name for the same
    expert_scaling: Literal["alpha/r", "alpha/sqrt(r)", "peft"] | None = None
    expert_b_layout: Literal["rank_major", "grouped_by_expert"] | None = None
    pinned: bool = False  # SGLang's name: it stays in host memory


class UnloadAdapterRequest(Body):
    lora_name: Annotated[str, Field(min_length=1, max_length=200)]


_Request = TypeVar("_Request", LoadAdapterRequest, UnloadAdapterRequest)


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/models/", include_in_schema=False)
    @routes.get("/v1/models")
    async def models(request: Request) -> Response:
        service, tenant = service_of(request), tenant_of(request)
        found = service.models(tenant)
        ends = (
            {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {"first_id": None, "last_id": None}
        )
        return json_response({"object": "list", "data": found, "has_more": False, **ends})

    @routes.get("/v1/models/{model:path}")
    async def model(request: Request, model: str) -> Response:
        service, tenant = service_of(request), tenant_of(request)
        name = service.adapter(tenant, model) or service.ready.model_name
        return json_response(next(entry for entry in service.models(tenant) if entry["id"] == name))

    @routes.post("/v1/load_lora_adapter", openapi_extra=described(LoadAdapterRequest, strict=True))
    async def load_lora_adapter(request: Request) -> Response:
        check_admin(request)
        info = await load(service_of(request), await _body(LoadAdapterRequest, request))
        return json_response(
            {
                "object": "adapter",
                "id": info.name,
                "path": info.path,
                "version": info.version,
                "format": info.format,
                "rank": info.rank,
                "num_bytes": info.num_bytes,
                "pinned": info.pinned,
                "warnings": info.warnings,
            }
        )

    @routes.post("/v1/unload_lora_adapter", openapi_extra=described(UnloadAdapterRequest, strict=True))
    async def unload_lora_adapter(request: Request) -> Response:
        check_admin(request)
        body = await _body(UnloadAdapterRequest, request)
        await unload(service_of(request), body.lora_name)
        return json_response({"object": "adapter", "id": body.lora_name, "unloaded": True})

    @routes.post("/load_lora_adapter", openapi_extra=described(LoadAdapterRequest, strict=True))
    async def sglang_load(request: Request) -> Response:
        """SGLang's form."""
        check_admin(request)
        await load(service_of(request), await _body(LoadAdapterRequest, request))
        return _sglang(service_of(request))

    @routes.post("/unload_lora_adapter", openapi_extra=described(UnloadAdapterRequest, strict=True))
    async def sglang_unload(request: Request) -> Response:
        check_admin(request)
        await unload(service_of(request), (await _body(UnloadAdapterRequest, request)).lora_name)
        return _sglang(service_of(request))

    @routes.get("/lora-adapters")
    async def llama_adapters(request: Request) -> Response:
        """llama-server's form. Its scale is what a request gets that names no adapter: none of it."""
        check_admin(request, "the list of adapters with their folders")
        return json_response(_llama(service_of(request)))

    @routes.post("/lora-adapters")
    async def llama_scales(request: Request) -> Response:
        """A scale for all requests would change other clients' answers: only 0, as it is, is accepted."""
        check_admin(request)
        service = service_of(request)
        async with service.small_bodies.read(request) as raw:
            try:
                scales = msgspec.json.decode(raw, type=list[_Scale])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                why = why_no_json(raw, error)
                raise bad_request(f"a list of objects with id and scale is expected: {why}") from None
        count = len(service.client.adapters)
        for given in scales:
            if not 0 <= given.id < count:
                raise bad_request(f"id {given.id}: there are {count} adapters, from 0 on", "id")
            if given.scale:
                raise bad_request("scale: an adapter is chosen by a request's model, not for all requests", "scale")
        return json_response(_llama(service))

    return routes


async def _body(kind: type[_Request], request: Request) -> _Request:
    async with service_of(request).small_bodies.read(request) as raw:
        return parse(kind, raw)


class _Scale(msgspec.Struct):
    id: int
    scale: float


def _sglang(service: Service) -> Response:
    loaded = {name: info.path for name, info in service.client.adapters.items()}
    return json_response({"success": True, "error_message": "", "loaded_adapters": loaded})


def _llama(service: Service) -> list[dict[str, Any]]:
    infos = service.client.adapters.values()
    return [{"id": i, "path": info.path, "scale": 0.0, "name": info.name} for i, info in enumerate(infos)]


async def load(service: Service, body: LoadAdapterRequest) -> m.AdapterInfo:
    """Raises ApiError, CallRefused or EngineUnavailable."""
    if body.lora_name == service.ready.model_name:
        raise ApiError(400, f"{body.lora_name!r} is the base model's name", param="lora_name")
    return await service.client.load_adapter(
        body.lora_name,
        await asyncio.to_thread(_allowed, body.lora_path, service.config),  # a file system may take its time
        replace=body.replace or body.load_inplace,
        expert_scaling=body.expert_scaling,
        expert_b_layout=body.expert_b_layout,
        pinned=body.pinned,
    )


async def unload(service: Service, name: str) -> None:
    """Raises ApiError, CallRefused or EngineUnavailable."""
    if name not in service.client.adapters:
        names = ", ".join(map(repr, service.client.adapters)) or "none"
        raise ApiError(
            404, f"no adapter {name!r} is loaded; loaded: {names}", param="lora_name", code="adapter_not_found"
        )
    await service.client.unload_adapter(name)


def _allowed(path: str, config: ServeConfig) -> str:
    """The folder; below a root, the one that its links lead to. Raises ApiError 403 for one outside the roots."""
    if config.allow_any_adapter_path:
        return path
    if not config.adapter_root:
        raise ApiError(
            403,
            "loading adapters while the server runs needs --adapter-root FOLDER (or --allow-any-adapter-path)",
            param="lora_path",
            code="no_adapter_root",
        )
    try:
        real = os.path.realpath(os.path.expanduser(path))
        roots = [os.path.realpath(root) for root in config.adapter_root]
        inside = any(os.path.commonpath([root, real]) == root for root in roots)
    except ValueError:  # a NUL byte
        inside = False
    if not inside or not path.startswith(("/", "~")):
        raise ApiError(
            403, "lora_path: not an absolute path below an --adapter-root", param="lora_path", code="path_not_allowed"
        )
    return real
