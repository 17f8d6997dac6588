"""The OpenAPI document: bodies as parsing takes them, what every endpoint may answer, and the keys."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api.http.bodies.values import NUMBER, Body
from api.http.fields.field import Field, Status
from api.http.fields.tables import fields_of, parts_of

_NULL = {"type": "null"}
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


def described(kind: type[Body], *, strict: bool = False) -> dict[str, Any]:
    """For a route's `openapi_extra`: the body, and that the answer may be a stream. `strict`: unknown fields are a 400
    whatever the settings say."""
    schema = {**body_schema(kind), "additionalProperties": not strict}
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    if "stream" in kind.model_fields:
        form = "application/x-ndjson" if "options" in kind.model_fields else "text/event-stream"
        extra["responses"] = {"200": {"content": {form: {}}}}  # a schema would be read as that of each event
    return extra


def body_schema(kind: type[Body]) -> dict[str, Any]:
    """What parsing takes: pydantic's schema, with `null` for what may be left out, numbers in quotes, aliases and
    no-ops."""
    schema = _inlined(kind)
    required = set(schema.get("required", ()))
    properties = {
        name: each if name in required else _optional(each) for name, each in schema.get("properties", {}).items()
    }
    for name, field in fields_of(kind).items():
        if field.status is not Status.SUPPORTED:
            properties[name] = properties[field.of] if field.of in properties else _unsupported(field)
    return {**schema, "properties": properties}


def _inlined(kind: type[Body]) -> dict[str, Any]:
    schema = kind.model_json_schema()
    nested = schema.pop("$defs", {})
    for part in parts_of(kind).values():
        nested[part.__name__] = {**body_schema(part), "additionalProperties": True}

    def inline(node: Any) -> Any:
        if isinstance(node, dict):
            name = str(node.get("$ref", "")).removeprefix("#/$defs/")
            return inline(nested[name]) if name in nested else {key: inline(value) for key, value in node.items()}
        return [inline(value) for value in node] if isinstance(node, list) else node

    inlined: dict[str, Any] = inline(schema)
    return inlined


def _optional(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = [each for each in schema.get("anyOf", [schema]) if each != _NULL]
    if any(each.get("type") in ("integer", "number") for each in kinds):
        kinds.append({"type": "string", "pattern": NUMBER})
    default = {"default": schema["default"]} if schema.get("default") is not None else {}
    return {"anyOf": [*({k: v for k, v in each.items() if k != "default"} for each in kinds), _NULL], **default}


def _unsupported(field: Field) -> dict[str, Any]:
    if field.status is Status.NO_OP and not field.values:
        return {"description": field.note}
    return {"enum": [*field.values, None], "description": field.note}


def document(app: FastAPI, *, keys: bool, reject_unknown: bool) -> dict[str, Any]:
    """`keys`: every endpoint but a few asks for one. `reject_unknown`: unknown fields are a 400."""
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            _complete(path, operation, reject_unknown=reject_unknown)
    schemes = {"bearer": {"type": "http", "scheme": "bearer"}}
    schemes["header"] = {"type": "apiKey", "in": "header", "name": "X-Api-Key"}
    schema.setdefault("components", {})["securitySchemes"] = schemes
    schema["security"] = [{"bearer": []}, {"header": []}, *([] if keys else [{}])]
    return schema


def _complete(path: str, operation: dict[str, Any], *, reject_unknown: bool) -> None:
    responses = operation["responses"]
    responses.pop("422", None)  # the framework's own; ours are 400
    if path in _WITHOUT_BODY:
        responses.update({"200": {"description": "served"}, "503": {"description": "not now"}})
        return
    error = _ANTHROPIC_ERROR if path.startswith("/v1/messages") else _OPENAI_ERROR
    error = _OLLAMA_ERROR if path.startswith("/api/") else error
    for status, description in (("4XX", "the request is wrong, or not now"), ("5XX", "the server cannot")):
        responses[status] = {"description": description, "content": {"application/json": {"schema": error}}}
    if path == "/health":
        responses["503"] = {"description": "not ready", "content": {"application/json": {"schema": _HEALTH}}}
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None and body.get("additionalProperties") is True and reject_unknown:
        body["additionalProperties"] = False
