"""JSON schemas of bodies as parsing takes them, for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.bodies.body import Body, Field, Status, fields_of, parts_of
from api.bodies.shapes import EXCLUSIVE, OTHER_NAMES
from api.bodies.values import NUMBER

_NULL = {"type": "null"}
_STRING = {"type": "string"}
_OUTPUTS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def described(kind: type[Body], *, strict: bool = False) -> dict[str, Any]:
    """For a route's `openapi_extra`: the body, and that the answer may be a stream. `strict`: unknown fields are a 400
    whatever the settings say."""
    schema = _documented(kind)
    if not kind.ONE_OF:
        schema = {**schema, "additionalProperties": not strict}
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    if "stream" in kind.model_fields:
        extra["responses"] = {"200": {"content": {kind.STREAM: {}}}}  # a schema would be read as that of each event
    return extra


def _documented(kind: type[Body]) -> dict[str, Any]:
    """Of what parsing takes, what a client is to send: no numbers in quotes, models and sizes of this server
    (api/endpoints/openapi.py), and the shapes of what is checked by hand."""
    schema = body_schema(kind)
    required = {*schema.get("required", ()), *(name for needed in kind.NEEDS.values() for name in needed)}
    properties = {name: _without_quotes(each) for name, each in schema["properties"].items()}
    for name, shape in _shapes(kind).items():
        properties[name] = shape if name in required else {"anyOf": [shape, _NULL]}
    if not kind.ONE_OF:
        return {**schema, "properties": properties, **_combinations(kind, properties)}
    common = {name: each for name, each in properties.items() if name not in kind.ONE_OF}
    forms = [
        {
            "type": "object",
            "required": [name],
            "properties": {**common, name: kind.SHAPES.get(name, {"type": "string"})},
            **_combinations(kind, common),
        }
        for name in kind.ONE_OF
    ]
    return {"anyOf": forms}


def _combinations(kind: type[Body], properties: Mapping[str, Any]) -> dict[str, Any]:
    """Of two fields that say the same a body has one; a field that needs others has them. (Both as one `not`, because
    generators of examples give up at a `not` beside a `dependentRequired`.)"""
    wrong: list[dict[str, Any]] = [{"required": [*pair]} for pair in EXCLUSIVE if properties.keys() >= set(pair)]
    for name, needed in kind.NEEDS.items():
        wrong += [{"required": [name], "properties": {other: False}} for other in needed]
    return {"not": {"anyOf": wrong}} if wrong else {}


def _shapes(kind: type[Body]) -> dict[str, dict[str, Any]]:
    names = fields_of(kind)
    shapes = {name: shape for name, shape in OTHER_NAMES.items() if name in names} | dict(kind.SHAPES)
    shapes |= {name: {"$ref": "#/components/schemas/Model"} for name in ("model",) if name in names}
    shapes |= {name: {"$ref": "#/components/schemas/OutputTokens"} for name in _OUTPUTS if name in names}
    shapes |= {name: shapes[field.of] for name, field in names.items() if field.of in shapes}
    return shapes


def _without_quotes(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(schema.get("properties"), dict):
        inner = {name: _without_quotes(each) for name, each in schema["properties"].items()}
        schema = {**schema, "properties": inner}
    if "anyOf" in schema:
        kinds = [_without_quotes(each) for each in schema["anyOf"] if each.get("pattern") != NUMBER]
        schema = {**schema, "anyOf": kinds}
    return schema


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
