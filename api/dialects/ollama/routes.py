"""Ollama's API, and its form of answers."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timezone
from typing import Any, ClassVar

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.bodies.generation import ChatOptions, CompletionOptions
from api.bodies.parsing import parse
from api.bodies.schema import described
from api.dialects.common.blocks import Blocks, blocks_of
from api.dialects.ollama.model_files import ModelFiles, model_files
from api.dialects.ollama.requests import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from api.errors import ApiError
from api.http.answers.generation import Answers, Update
from api.http.answers.streaming import ResponseFormatter
from api.http.handling import model_of, open_chat, respond, service_of, tenant_of
from api.http.service import Service
from api.http.wire import json_response
from api.prepare.job import Kind
from api.prepare.prompts import unpacked
from api.tenants.record import Tenant
from api.text.deltas import Delta, Reasoning, text_of

_OLLAMA = "0.12.6"
_NEVER = "2318-01-01T00:00:00Z"
_STAYS = "models are given at the start, adapters by /v1/load_lora_adapter"
_NOT_HERE = (
    ("/api/embed", ["POST"], "this model does not support embeddings"),
    ("/api/embeddings", ["POST"], "this model does not support embeddings"),
    ("/api/create", ["POST"], _STAYS),
    ("/api/copy", ["POST"], _STAYS),
    ("/api/delete", ["DELETE"], _STAYS),
    ("/api/push", ["POST"], _STAYS),
    ("/api/blobs/{digest}", ["HEAD", "POST"], _STAYS),
)


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
        return json_response({"models": await _models(service, tenant)})

    @routes.get("/api/ps")
    async def running(request: Request) -> Response:
        """All models are loaded, and stay."""
        service, tenant = service_of(request), tenant_of(request)
        more = {"expires_at": _NEVER, "size_vram": 0, "context_length": tenant.context(service.ready.max_model_len)}
        return json_response({"models": [model | more for model in await _models(service, tenant)]})

    @routes.post("/api/show", openapi_extra=described(OllamaShowRequest, strict=True))
    async def show(request: Request) -> Response:
        service, tenant = service_of(request), tenant_of(request)
        async with service.small_bodies.read(request) as raw:
            body = parse(OllamaShowRequest, raw)
        wanted = (body.model or service.ready.model_name).removesuffix(":latest")
        name = service.adapter(tenant, wanted) or service.ready.model_name
        entry = next(entry for entry in service.models(tenant) if entry["id"] == name)
        files = await _files(service)
        template = None if service.tokenizer is None else service.tokenizer.template
        shown = {
            **_model(service, entry, files),
            "license": "",
            "modelfile": f"FROM {entry['id']}\n",
            "parameters": "\n".join(f"{name} {value}" for name, value in service.defaults.items()),
            "template": "" if template is None else template.source,
            "model_info": _info(entry, files),
            "capabilities": _capabilities(service),
        }
        return json_response(shown)

    @routes.post("/api/pull", openapi_extra=described(OllamaPullRequest, strict=True))
    async def pull(request: Request) -> Response:
        """A model that is served is here already; others are not fetched: a 404."""
        service, tenant = service_of(request), tenant_of(request)
        async with service.small_bodies.read(request) as raw:
            body = parse(OllamaPullRequest, raw)
        service.adapter(tenant, (body.model or service.ready.model_name).removesuffix(":latest"))
        done = {"status": "success"}
        return Response(_line(done), media_type="application/x-ndjson") if body.stream else json_response(done)

    @routes.get("/api/version")
    async def version() -> Response:
        """That of Ollama whose API this is."""
        return json_response({"version": _OLLAMA})

    for path, methods, why in _NOT_HERE:
        routes.add_api_route(path, _refusing(path, why), methods=methods, include_in_schema=False)

    return routes


async def _chat(request: Request, kind: Kind, field: str) -> Response:
    service, tenant = service_of(request), tenant_of(request)
    prepared = await service.prepare(kind, request)
    if not prepared.prompts:
        return _loaded(service, tenant, msgspec.json.decode(prepared.options), field)
    if prepared.is_raw:
        body: ChatOptions | CompletionOptions = CompletionOptions.model_validate_json(prepared.options)
        adapter = service.adapter(tenant, body.model)
        answers = await service.submit(body, tenant, adapter, [unpacked(prepared.prompts[0])], prepared)
    else:
        body, answers = await open_chat(request, prepared)
    formatter = OllamaFormatter(model_of(request, body), answers, field)
    return await respond(request, answers, formatter, stream=body.stream)


def _refusing(path: str, why: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        tenant_of(request)
        raise ApiError(501, f"{path}: {why}", code="not_supported")

    return refuse


def _loaded(service: Service, tenant: Tenant, asked: dict[str, Any], field: str) -> Response:
    """The answer to a request that asks nothing: the model is loaded, and stays."""
    name = service.adapter(tenant, (asked["model"] or "").removesuffix(":latest")) or service.ready.model_name
    empty: Any = "" if field == "response" else {"role": "assistant", "content": ""}
    answer = {"model": name, "created_at": _now(), field: empty, "done": True, "done_reason": "load"}
    return Response(_line(answer), media_type=OllamaFormatter.media_type) if asked["stream"] else json_response(answer)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


async def _files(service: Service) -> ModelFiles:
    return await asyncio.to_thread(model_files, service.client.config.model or "")


async def _models(service: Service, tenant: Tenant) -> list[dict[str, Any]]:
    files = await _files(service)
    return [_model(service, entry, files) for entry in service.models(tenant)]


def _model(service: Service, entry: dict[str, Any], files: ModelFiles) -> dict[str, Any]:
    """An adapter has a size and a digest of its own; the rest is the base's."""
    changed = datetime.fromtimestamp(entry["created"], timezone.utc).isoformat()
    adapter = service.client.adapters.get(entry["id"])
    own = "" if adapter is None else f"{adapter.path} {adapter.version} {adapter.num_bytes}"
    details = {
        "parent_model": entry["parent"] or "",
        "format": files.form,
        "family": files.family,
        "families": [files.family] if files.family else [],
        "parameter_size": files.parameter_size,
        "quantization_level": files.quantisation,
    }
    return {
        "name": entry["id"],
        "model": entry["id"],
        "modified_at": changed,
        "size": files.num_bytes if adapter is None else adapter.num_bytes,
        "digest": hashlib.sha256(f"{files.digest} {own}".encode()).hexdigest(),
        "details": details,
    }


def _capabilities(service: Service) -> list[str]:
    """What the chat template can render."""
    template = None if service.tokenizer is None else service.tokenizer.template
    known = (("tools", "tools"), ("thinking", "enable_thinking"))
    return ["completion", *(name for name, word in known if template is not None and word in template.source)]


def _info(entry: dict[str, Any], files: ModelFiles) -> dict[str, Any]:
    """As GGUF's metadata has it; the context is the server's."""
    family = files.family or "unknown"
    return {
        "general.architecture": family,
        "general.basename": entry["id"],
        "general.parameter_count": files.parameters,
        **{f"{family}.{name}": value for name, value in files.info.items()},
        f"{family}.context_length": entry["max_model_len"],
    }


def error_body(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


class OllamaFormatter(ResponseFormatter):
    """`field`: "message" of a chat, "response" of a generation. Calls are written whole, at the end."""

    media_type: ClassVar[str] = "application/x-ndjson"
    keep_alive: ClassVar[bytes] = b""
    close: ClassVar[bytes] = b""

    def __init__(self, model: str, answers: Answers, field: str) -> None:
        self._model = model
        self._answers = answers
        self._field = field
        self._blocks = Blocks()
        self._reason = "stop"
        self._began = time.monotonic()

    def whole(self, choices: Sequence[Update]) -> dict[str, Any]:
        blocks = blocks_of(choices[0].deltas)
        return {**self._head(), **self._part(choices[0].deltas, blocks), **self._last(choices[0].finish_reason)}

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": _now()}

    def _part(self, deltas: Sequence[Delta], calls: Blocks | None = None) -> dict[str, Any]:
        text = text_of(deltas)
        thinking = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if self._field == "response":
            return {"response": text, **more}
        if calls is not None and calls.calls:
            functions = [{"name": call.name, "arguments": call.arguments} for call in calls.calls]
            more["tool_calls"] = [{"function": function} for function in functions]
        return {"message": {"role": "assistant", "content": text, **more}}

    def _last(self, reason: str | None) -> dict[str, Any]:
        usage = self._answers.usage()
        taken_ns = int((time.monotonic() - self._began) * 1e9)
        first_s = self._answers.first_token_s
        prompt_ns = taken_ns if first_s is None else min(taken_ns, int(first_s * 1e9))
        return {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": taken_ns,
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": prompt_ns,
            "eval_count": usage["completion_tokens"],
            "eval_duration": taken_ns - prompt_ns,
        }

    def update(self, index: int, update: Update) -> bytes:
        self._reason = update.finish_reason or self._reason
        for _ in self._blocks.push(update.deltas):
            pass
        shown = [delta for delta in update.deltas if isinstance(delta, Reasoning) or text_of([delta])]
        return _line({**self._head(), **self._part(shown), "done": False}) if shown else b""

    def end(self) -> bytes:
        return _line({**self._head(), **self._part([], self._blocks), **self._last(self._reason)})

    def error(self, error: ApiError) -> bytes:
        return _line(error_body(error))


def _line(data: dict[str, Any]) -> bytes:
    return msgspec.json.encode(data) + b"\n"
