"""JSON schemas of bodies as parsing takes them, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from api.bodies.body import Body, Field, Status, fields_of, parts_of
from api.bodies.values import NUMBER

_NULL = {"type": "null"}


def described(kind: type[Body], *, strict: bool = False) -> dict[str, Any]:
    """For a route's `openapi_extra`: the body, and that the answer may be a stream. `strict`: unknown fields are a 400
    whatever the settings say."""
    schema = {**body_schema(kind), "additionalProperties": not strict}
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    if "stream" in kind.model_fields:
        extra["responses"] = {"200": {"content": {kind.STREAM: {}}}}  # a schema would be read as that of each event
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
