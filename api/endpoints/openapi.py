"""The OpenAPI document: what every endpoint takes and may answer, and the keys."""

from __future__ import annotations

from typing import Any, get_args

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from engine.messages import PlannedKind

_OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
_WITHOUT_BODY = {"/ping"}
_HEALTH = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}}


def _answer(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": [*required, *properties], "properties": properties}


_LIST = {"type": "array"}
_COUNT = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string"}
_OLLAMA = _answer("model", "created_at", done={"const": True}, done_reason=_TEXT)
_PLANNED_ITEM = _answer(label=_TEXT, num_bytes=_COUNT, kind={"enum": list(get_args(PlannedKind))})
_PLANNED_MEMORY = _answer(
    device=_TEXT, limit_bytes=_COUNT, free_bytes=_COUNT, items={"type": "array", "items": _PLANNED_ITEM}
)
_ANSWERS = {  # of whole answers
    "/v1/chat/completions": _answer("id", "created", "model", "usage", object=_TEXT, choices=_LIST),
    "/v1/completions": _answer("id", "created", "model", "usage", object=_TEXT, choices=_LIST),
    "/v1/responses": _answer("id", "created_at", "model", "usage", status=_TEXT, output=_LIST),
    "/v1/responses/input_tokens": _answer("object", input_tokens=_COUNT),
    "/v1/responses/compact": _answer("id", "created_at", "usage", object=_TEXT, output=_LIST),
    "/v1/messages": _answer("id", "model", "usage", type={"const": "message"}, content=_LIST),
    "/v1/messages/count_tokens": _answer(input_tokens=_COUNT),
    "/api/chat": _OLLAMA,
    "/api/generate": _OLLAMA,
    "/api/tags": _answer(models=_LIST),
    "/api/ps": _answer(models=_LIST),
    "/api/show": _answer("details", "model_info", capabilities=_LIST),
    "/api/version": _answer(version=_TEXT),
    "/v1/models": _answer(object={"const": "list"}, data=_LIST),
    "/v1/plan": _answer(
        model=_TEXT, memory={"type": "array", "items": _PLANNED_MEMORY}, lines={"type": "array", "items": _TEXT}
    ),
    "/tokenize": _answer(tokens=_LIST, count=_COUNT),
    "/detokenize": _answer(prompt=_TEXT),
    "/apply-template": _answer(prompt=_TEXT),
    "/props": _answer("default_generation_settings", total_slots=_COUNT),
    "/slots": _LIST,
}


def of_server(document: dict[str, Any], models: list[str], most_tokens: int, vocabulary: int) -> dict[str, Any]:
    """The document with what is this server's: the models that the caller may name, and how long an output may be
    beside a prompt of half of the context."""
    own = {
        "Model": {"enum": [*models, "", None]} if models else {"type": ["string", "null"]},
        "TokenId": {"type": "integer", "minimum": 0, "maximum": max(0, vocabulary - 1)},
        "OutputTokens": {"type": "integer", "minimum": 1, "maximum": max(1, most_tokens // 2)},
    }
    return {**document, "components": {**document["components"], "schemas": own}}


def document(app: FastAPI, *, keys: bool, reject_unknown: bool, root_path: str = "") -> dict[str, Any]:
    """`keys`: every endpoint but a few asks for one. `reject_unknown`: unknown fields are a 400. `root_path`: under
    which a proxy publishes the server."""
    servers: list[dict[str, Any]] | None = [{"url": root_path}] if root_path else None
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes, servers=servers)
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            _complete(path, operation, reject_unknown=reject_unknown)
    schemes = {"bearer": {"type": "http", "scheme": "bearer"}}
    schemes["header"] = {"type": "apiKey", "in": "header", "name": "X-Api-Key"}
    schema["components"] = {"securitySchemes": schemes}
    schema["security"] = [{"bearer": []}, {"header": []}, *([] if keys else [{}])]
    return schema


def _complete(path: str, operation: dict[str, Any], *, reject_unknown: bool) -> None:
    responses = operation["responses"]
    responses.pop("422", None)  # the framework's own; ours are 400
    if path in _WITHOUT_BODY:
        responses.update({"200": {"description": "served"}, "503": {"description": "not now"}})
        return
    if path in _ANSWERS and "200" in responses:
        responses["200"].setdefault("content", {})["application/json"] = {"schema": _ANSWERS[path]}
    error = _ANTHROPIC_ERROR if path.startswith("/v1/messages") else _OPENAI_ERROR
    error = _OLLAMA_ERROR if path.startswith("/api/") else error
    for status, description in (("4XX", "the request is wrong, or not now"), ("5XX", "the server cannot")):
        responses[status] = {"description": description, "content": {"application/json": {"schema": error}}}
    if path == "/health":
        responses["503"] = {"description": "not ready", "content": {"application/json": {"schema": _HEALTH}}}
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None and body.get("additionalProperties") is True and reject_unknown:
        body["additionalProperties"] = False
