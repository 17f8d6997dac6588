"""Ollama's /api/chat, /api/generate, /api/tags, /api/show and /api/version"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.bodies.generation import ChatOptions, CompletionOptions
from api.bodies.parsing import parse
from api.bodies.schema import described
from api.dialects.ollama.bodies import OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest
from api.dialects.ollama.formatter import OllamaFormatter
from api.http.handling import model_of, open_chat, respond, service_of, tenant_of
from api.http.service import Service
from api.http.wire import json_response
from api.prepare.job import Kind
from api.prepare.prompts import unpacked
from api.version import project_version


def router() -> APIRouter:
    routes = APIRouter()

    @routes.post("/api/chat", openapi_extra=described(OllamaChatRequest))
    async def chat(request: Request) -> Response:
        return await _chat(request, Kind.OLLAMA_CHAT, "message")

    @routes.post("/api/generate", openapi_extra=described(OllamaGenerateRequest))
    async def generate(request: Request) -> Response:
        return await _chat(request, Kind.OLLAMA_GENERATE, "response")

    @routes.get("/api/tags")
    async def tags(request: Request) -> Response:
        service, tenant = service_of(request), tenant_of(request)
        return json_response({"models": [_model(service, entry) for entry in service.models(tenant)]})

    @routes.post("/api/show", openapi_extra=described(OllamaShowRequest, strict=True))
    async def show(request: Request) -> Response:
        service, tenant = service_of(request), tenant_of(request)
        async with service.small_bodies.read(request) as raw:
            body = parse(OllamaShowRequest, raw)
        wanted = (body.model or service.ready.model_name).removesuffix(":latest")
        name = service.adapter(tenant, wanted) or service.ready.model_name
        entry = next(entry for entry in service.models(tenant) if entry["id"] == name)
        return json_response(
            {**_model(service, entry), "model_info": _info(entry), "capabilities": _capabilities(service)}
        )

    @routes.get("/api/version")
    async def version() -> Response:
        return json_response({"version": project_version()})

    return routes


async def _chat(request: Request, kind: Kind, field: str) -> Response:
    service, tenant = service_of(request), tenant_of(request)
    prepared = await service.prepare(kind, request)
    if prepared.is_raw:
        body: ChatOptions | CompletionOptions = CompletionOptions.model_validate_json(prepared.options)
        adapter = service.adapter(tenant, body.model)
        answers = await service.submit(body, tenant, adapter, [unpacked(prepared.prompts[0])], prepared)
    else:
        body, answers = await open_chat(request, prepared)
    formatter = OllamaFormatter(model_of(request, body), answers, field)
    return await respond(request, answers, formatter, stream=body.stream)


def _model(service: Service, entry: dict[str, Any]) -> dict[str, Any]:
    changed = datetime.fromtimestamp(entry["created"], timezone.utc).isoformat()
    details = {
        "parent_model": entry["parent"] or "",
    }
    return {"name": entry["id"], "model": entry["id"], "modified_at": changed, "details": details}


def _capabilities(service: Service) -> list[str]:
    """What the chat template can render."""
    template = None if service.tokenizer is None else service.tokenizer.template
    known = (("tools", "tools"), ("thinking", "enable_thinking"))
    return ["completion", *(name for name, word in known if template is not None and word in template.source)]


def _info(entry: dict[str, Any]) -> dict[str, Any]:
    return {"general.basename": entry["id"], "general.context_length": entry["max_model_len"]}
