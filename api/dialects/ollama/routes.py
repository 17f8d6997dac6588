"""Ollama's /api/chat, /api/generate, /api/tags, /api/show and /api/version, and its form of answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
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
from api.dialects.ollama.requests import OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest
from api.errors import ApiError
from api.http.answers.generation import Answers, Update
from api.http.answers.streaming import ResponseFormatter
from api.http.handling import model_of, open_chat, respond, service_of, tenant_of
from api.http.service import Service
from api.http.wire import json_response
from api.prepare.job import Kind
from api.prepare.prompts import unpacked
from api.text.deltas import Delta, Reasoning, text_of
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
    details = {"parent_model": entry["parent"] or ""}
    return {"name": entry["id"], "model": entry["id"], "modified_at": changed, "details": details}


def _capabilities(service: Service) -> list[str]:
    """What the chat template can render."""
    template = None if service.tokenizer is None else service.tokenizer.template
    known = (("tools", "tools"), ("thinking", "enable_thinking"))
    return ["completion", *(name for name, word in known if template is not None and word in template.source)]


def _info(entry: dict[str, Any]) -> dict[str, Any]:
    return {"general.basename": entry["id"], "general.context_length": entry["max_model_len"]}


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
        now = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
        return {"model": self._model, "created_at": now}

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
        return {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": taken_ns,
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "eval_count": usage["completion_tokens"],
            "eval_duration": taken_ns,
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
