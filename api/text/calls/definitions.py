"""The tools that a request brings, checked: their names, the schemas of their parameters, and which may or must be
called."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from api.errors import ApiError, UnreadableError, bad_request, shortened
from api.text.calls.free_text import NotRegularError, parameters_of_text, regex_of_format
from api.text.kinds import CHAT_TOOLS, Fate

MAX_TOOLS = 1024
_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")
_MAX_VALUES = 16_384  # in all definitions of a request
_MAX_DEPTH = 64
_FIELDS = {
    "function": {"name", "description", "parameters", "strict"},
    "custom": {"name", "description", "format"},
}
_NULLABLE = ("properties", "required")
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True)
class Tool:
    """`definition`: as chat templates expect it. `strict`: its arguments are to follow the schema. `free`: it takes a
    text, which is its one argument. `held`: the schema that arguments are held to, where that is not the whole one."""

    name: str
    definition: dict[str, Any]
    strict: bool = False
    free: bool = False
    held: dict[str, Any] | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        schema = self.definition["function"].get("parameters")
        return schema or {"type": "object"}

    @property
    def enforced(self) -> dict[str, Any]:
        return self.parameters if self.held is None else self.held


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

    @property
    def free(self) -> tuple[str, ...]:
        """The tools that take a text."""
        return tuple(tool.name for tool in self.tools if tool.free)


class Choice(NamedTuple):
    """`wanted`: none, auto or required. `only`: the tool to call. `among`: the tools that may be called, if not all."""

    wanted: str
    only: str | None = None
    among: frozenset[str] | None = None


class Offer(NamedTuple):
    """What is left of a request's tools. `use` None: none may be called. `remarks`: (place, what became of it)."""

    use: ToolUse | None
    remarks: tuple[tuple[str, str], ...] = ()


def tool_use(
    tools: Sequence[Any], functions: Sequence[Any], choice: Any, function_call: Any, *, parallel: bool
) -> Offer:
    """`functions` and `function_call` are the older form. Raises ApiError 400."""
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
    remarks: list[tuple[str, str]] = []
    read = [_tool(tool, f"{where}[{i}]", where, remarks) for i, tool in enumerate(wrapped)]
    named: dict[str, Tool] = {}
    for tool in read:
        if tool is not None:
            if tool.name in named:
                remarks.append((where, f"{shortened(tool.name)} is defined again: its last definition is offered"))
            named[tool.name] = tool
    offered = list(named.values())
    choices = {"tool_choice": _choice(choice, "tool_choice"), "function_call": _choice(function_call, "function_call")}
    chosen = choices.pop(param)
    for other, unused in choices.items():
        if unused.wanted == "required":
            raise bad_request(f"{other} does not belong to {where}: send {param}", other)
    if chosen.only is not None and all(tool.name != chosen.only for tool in offered):
        raise bad_request(f"{param}: there is no tool {shortened(chosen.only)}", param)
    if chosen.among is not None:
        offered = [tool for tool in offered if tool.name in chosen.among]
    if chosen.wanted == "required" and not offered:
        if not wrapped:
            raise bad_request(f"{param}: 'required' needs tools", param)
        remarks.append((param, "no tool is left to call"))
    if not offered or chosen.wanted == "none":
        return Offer(None, tuple(remarks))
    one = bool(functions) or not parallel or chosen.only is not None
    use = ToolUse(tuple(offered), chosen.wanted == "required", chosen.only, one=one)
    return Offer(use, tuple(remarks))


def check_tool(given: Any, where: str) -> None:
    """A tool that stands in a history. Raises UnreadableError if it could not be offered."""
    try:
        _check_size([given], where)
        _tool(given, where, where, [])
    except ApiError as error:
        raise UnreadableError(error.message, where) from None


def _choice(given: Any, param: str) -> Choice:
    match given:
        case None:
            return Choice("auto")
        case "none" | "auto":
            return Choice(given)
        case {"name": str(name)} if param == "function_call":
            return Choice("required", name)
        case "required" | "any" | {"type": "required" | "any"} if param == "tool_choice":
            return Choice("required")
        case {"type": "none" | "auto" as wanted} if param == "tool_choice":
            return Choice(wanted)
        case (
            {"type": "function", "function": {"name": str(name)}}
            | {"type": "custom", "custom": {"name": str(name)}}
            | {"type": "function" | "custom" | "tool", "name": str(name)}
        ) if param == "tool_choice":
            return Choice("required", name)
        case {"type": "allowed_tools", "allowed_tools": {"tools": list(among), **how}} if param == "tool_choice":
            mode = how.get("mode", "auto")
            names = frozenset(each for each in map(_name_in, among) if each is not None)
            if mode in _CHOICES:
                return Choice(mode, among=names)
    form = '{"type": "function", "function": {"name": ...}}' if param == "tool_choice" else '{"name": ...}'
    choices = ", ".join(map(repr, _CHOICES if param == "tool_choice" else _CHOICES[:2]))
    raise bad_request(f"{param}: {choices} or {form} is expected, got {shortened(given)}", param)


def _name_in(tool: Any) -> str | None:
    """Of one of the allowed tools. None if it names no tool of the client's."""
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "custom", "custom": {"name": str(name)}}:
            return name
    return None


def _tool(given: Any, where: str, param: str, remarks: list[tuple[str, str]]) -> Tool | None:
    """None: it is left out. `remarks` grows."""
    if isinstance(given, dict) and given and not given.keys() & {"type", "name", "function"}:  # {"google_search": {}}
        remarks.append((where, f"{shortened(next(iter(given)))} is left out"))
        return None
    given = _wrapped(given)
    if not isinstance(given, dict) or not isinstance(kind := given.get("type"), str):
        raise bad_request(f'{where}: {{"type": "function", "function": {{...}}}} is expected', param)
    if CHAT_TOOLS.fate(kind) is not Fate.READ:
        remarks.append((where, f"{shortened(kind)} is left out"))
        return None
    if not isinstance(given.get(kind), dict):
        raise bad_request(f'{where}: {{"type": "{kind}", "{kind}": {{...}}}} is expected', param)
    place = f"{where}.{kind}"
    function = {key: value for key, value in given[kind].items() if value is not None}
    for unknown in sorted(set(function) - _FIELDS[kind]):
        function.pop(unknown)
        remarks.append((place, f"{shortened(unknown)} is left out"))
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_request(f"{place}.name: 1 to 128 of a-z, A-Z, 0-9, _.:- are expected, got {shortened(name)}",
                          param)  # fmt: skip
    if not isinstance(function.get("description", ""), str):
        raise bad_request(f"{place}.description: a text is expected", param)
    if kind == "custom":
        return _free(name, function, place, param, remarks)
    strict = function.pop("strict", False)
    if not isinstance(strict, bool):
        raise bad_request(f"{place}.strict: true or false is expected", param)
    if isinstance(schema := function.get("parameters"), dict):  # some clients write null for nothing
        schema = {key: value for key, value in schema.items() if value is not None or key not in _NULLABLE}
        if not strict and _may_be_object(kinds := schema.get("type")) and kinds != "object":
            remarks.append((f"{place}.parameters", f"type {shortened(kinds)} is read as 'object'"))
            schema["type"] = "object"
        function["parameters"] = schema
    if "parameters" in function:
        _check_schema(function["parameters"], f"{place}.parameters", param)
    return Tool(name, {"type": "function", "function": function}, strict)


def _wrapped(given: Any) -> Any:
    """A tool in the form of other vendors' requests, its function not in an object of its own: in that of a chat's."""
    if not isinstance(given, dict) or "name" not in given or given.keys() & {"function", "custom"}:
        return given
    kind = given.get("type") or "function"
    fields = {key: value for key, value in given.items() if key != "type"}
    if "input_schema" in fields and kind in ("function", "custom"):
        kind, fields["parameters"] = "function", fields.pop("input_schema")
    return {"type": kind, kind: fields} if kind in ("function", "custom") else given


def _free(name: str, given: dict[str, Any], place: str, param: str, remarks: list[tuple[str, str]]) -> Tool:
    """A tool that takes a text. A grammar that it names is not in the prompt; the text is held to it."""
    form = given.pop("format", {})
    if not isinstance(form, dict):
        raise bad_request(f"{place}.format: an object is expected, got {shortened(form)}", param)
    pattern = None
    try:
        pattern = regex_of_format(form)
    except NotRegularError as error:
        remarks.append((f"{place}.format", f"{name} is not held to its grammar: {error}"))
    function = {**given, "parameters": parameters_of_text()}
    held = None if pattern is None else parameters_of_text(pattern)
    return Tool(name, {"type": "function", "function": function}, strict=held is not None, free=True, held=held)


def _may_be_object(kinds: Any) -> bool:
    """Of a schema's type: a list that has it, or as Gemini's clients write it."""
    return "object" in kinds if isinstance(kinds, list) else isinstance(kinds, str) and kinds.lower() == "object"


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
