"""The tools that a request brings, checked: their names, the schemas of their parameters, and which may or must be
called."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api.errors import ApiError, bad_request, shortened

MAX_TOOLS = 1024
_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")
_MAX_VALUES = 16_384  # in all definitions of a request
_MAX_DEPTH = 64
_FIELDS = {"name", "description", "parameters", "strict"}
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True)
class Tool:
    """`definition`: as chat templates expect it. `strict`: its arguments are to follow the schema."""

    name: str
    definition: dict[str, Any]
    strict: bool = False

    @property
    def parameters(self) -> dict[str, Any]:
        schema = self.definition["function"].get("parameters")
        return schema or {"type": "object"}


@dataclass(frozen=True)
class ToolUse:
    """`must`: the answer is a call, of `only` if that is a name; `one`: it is one call at most."""

    tools: tuple[Tool, ...]
    must: bool = False
    only: str | None = None
    one: bool = False

    @property
    def callable(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if self.only in (None, tool.name))


def tool_use(
    tools: Sequence[Any], functions: Sequence[Any], choice: Any, function_call: Any, *, parallel: bool
) -> ToolUse | None:
    """None if no tool may be called. `functions` and `function_call` are the older form. Raises ApiError 400."""
    if functions and tools:
        raise bad_request("functions is the older form of tools: send one of them", "functions")
    if functions:
        where, param = "functions", "function_call"
        wrapped = [{"type": "function", "function": function} for function in functions]
    else:
        where, param, wrapped = "tools", "tool_choice", list(tools)
    if len(wrapped) > MAX_TOOLS:
        raise bad_request(f"{where}: {len(wrapped)} are more than {MAX_TOOLS}", where)
    _check_size(wrapped, where)
    checked = tuple(_tool(tool, f"{where}[{i}]", where) for i, tool in enumerate(wrapped))
    for i, tool in enumerate(checked):
        if any(tool.name == other.name for other in checked[:i]):
            raise bad_request(f"{where}[{i}]: the name {tool.name!r} is taken already", where)
    choices = {"tool_choice": _choice(choice, "tool_choice"), "function_call": _choice(function_call, "function_call")}
    wanted, only = choices.pop(param)
    for other, (unused, _) in choices.items():
        if unused == "required":
            raise bad_request(f"{other} does not belong to {where}: send {param}", other)
    if only is not None and all(tool.name != only for tool in checked):
        raise bad_request(f"{param}: there is no tool {shortened(only)}", param)
    if wanted == "required" and not checked:
        raise bad_request(f"{param}: 'required' needs tools", param)
    if not checked or wanted == "none":
        return None
    return ToolUse(checked, wanted == "required", only, one=bool(functions) or not parallel or only is not None)


def _choice(given: Any, param: str) -> tuple[str, str | None]:
    """none, auto or required, and the only tool that may be called."""
    match given:
        case None:
            return "auto", None
        case "none" | "auto":
            return given, None
        case "required" if param == "tool_choice":
            return given, None
        case {"type": "function", "function": {"name": str(name)}} if param == "tool_choice":
            return "required", name
        case {"name": str(name)} if param == "function_call":
            return "required", name
    form = '{"type": "function", "function": {"name": ...}}' if param == "tool_choice" else '{"name": ...}'
    choices = ", ".join(map(repr, _CHOICES if param == "tool_choice" else _CHOICES[:2]))
    raise bad_request(f"{param}: {choices} or {form} is expected, got {shortened(given)}", param)


def _tool(given: Any, where: str, param: str) -> Tool:
    if not isinstance(given, dict) or given.get("type") != "function" or not isinstance(given.get("function"), dict):
        raise bad_request(f'{where}: {{"type": "function", "function": {{...}}}} is expected', param)
    function = {key: value for key, value in given["function"].items() if value is not None}
    if unknown := sorted(set(function) - _FIELDS):
        raise bad_request(f"{where}.function: unknown field {shortened(unknown[0])}", param)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_request(f"{where}.function.name: 1 to 128 of a-z, A-Z, 0-9, _.:- are expected, got {shortened(name)}",
                          param)  # fmt: skip
    if not isinstance(function.get("description", ""), str):
        raise bad_request(f"{where}.function.description: a text is expected", param)
    strict = function.pop("strict", False)
    if not isinstance(strict, bool):
        raise bad_request(f"{where}.function.strict: true or false is expected", param)
    if "parameters" in function:
        _check_schema(function["parameters"], f"{where}.function.parameters", param)
    return Tool(name, {"type": "function", "function": function}, strict)


def _check_schema(schema: Any, where: str, param: str) -> None:
    """What every user of a schema relies on; what else is wrong in one is found where it is compiled."""
    if not isinstance(schema, dict):
        raise bad_request(f"{where}: a JSON schema (an object) is expected, got {shortened(schema)}", param)
    if schema and schema.get("type", "object") != "object":
        raise bad_request(f'{where}.type: "object" is expected, got {shortened(schema["type"])}', param)
    properties = schema.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(one, dict | bool) for one in properties.values()):
        raise bad_request(f"{where}.properties: an object of JSON schemas is expected", param)
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise bad_request(f"{where}.required: a list of names is expected", param)


def _check_size(definitions: list[Any], param: str) -> None:
    left: list[tuple[Any, int]] = [(definitions, 0)]
    seen = 0
    while left:
        value, depth = left.pop()
        items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        seen += len(items)
        if seen > _MAX_VALUES or depth > _MAX_DEPTH:
            raise _too_large(param)
        left += [(item, depth + 1) for item in items]


def _too_large(param: str) -> ApiError:
    return bad_request(f"{param}: at most {_MAX_VALUES} values, {_MAX_DEPTH} levels deep, are allowed", param)


def parameters_of(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    """Function -> parameter -> its schema."""
    return {tool.name: dict(_mapping(tool.parameters.get("properties"))) for tool in tools}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
