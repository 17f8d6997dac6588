"""The messages of a chat request, checked and brought into the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from api.errors import ApiError, bad_request, shortened

Unknown = Callable[[str, str], None]  # is told the name of a field that nobody knows, and where it stands

_FIELDS = {"role", "content", "name", "reasoning_content", "tool_calls", "function_call", "tool_call_id"}
_NOT_YET = {"audio", "refusal"}
_ECHOED = {"annotations"}  # what an answer carries and clients send back; empty here
_ROLES = {"system", "user", "assistant", "tool"}
_MAX_CALLS = 1024  # of one message


def refused(key: str, where: str) -> None:
    """An `Unknown` that takes none. Raises ApiError."""
    name = f"{where}.{key[:100]}"
    raise bad_request(f"unknown field '{name}'", name, "unknown_field")


def normalise(messages: Sequence[dict[str, Any]], unknown: Unknown = refused) -> list[dict[str, Any]]:
    """Content parts joined to text, `developer` as `system`, `function` as `tool`, arguments of calls as objects where
    they are such, null and unknown fields left out. Raises ApiError 400 naming messages[i].field."""
    return [_message(message, f"messages[{i}]", unknown) for i, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str, unknown: Unknown) -> dict[str, Any]:
    fields = {key: value for key, value in message.items() if value is not None}
    if "reasoning" in fields:  # another name of it
        fields.setdefault("reasoning_content", fields.pop("reasoning"))
    for key in fields:
        if key in _NOT_YET or (key in _ECHOED and fields[key]):
            if fields[key] not in ([], ""):
                raise _not_yet(f"{where}.{key}")
        elif key not in _FIELDS | _ECHOED:
            unknown(key, where)
    given = fields.get("role")
    role = {"developer": "system", "function": "tool"}.get(given, given) if isinstance(given, str) else given
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_request(
            f"{where}.role: 'system', 'user', 'assistant' or 'tool' is expected, got {shortened(given)}",
            f"{where}.role",
        )
    content = _content(fields.get("content"), role, f"{where}.content", unknown)
    result: dict[str, Any] = {"role": role, "content": content}
    for key in ("name", "reasoning_content", "tool_call_id"):
        if key in fields:
            if not isinstance(fields[key], str):
                raise bad_request(f"{where}.{key}: a text is expected", f"{where}.{key}")
            result[key] = fields[key]
    if calls := _calls(fields, role, where):
        result["tool_calls"] = calls
    return result


def _calls(fields: dict[str, Any], role: str, where: str) -> list[dict[str, Any]]:
    """The calls that an assistant's message made."""
    calls = fields.get("tool_calls") or []
    if function := fields.get("function_call"):
        calls = [{"type": "function", "function": function}]
        where = f"{where}.function_call"
    else:
        where = f"{where}.tool_calls"
    if calls and role != "assistant":
        raise bad_request(f"{where}: only an assistant's message has calls", where)
    if not isinstance(calls, list) or len(calls) > _MAX_CALLS:
        raise bad_request(f"{where}: a list of at most {_MAX_CALLS} calls is expected", where)
    return [_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(name), **more}} if call.get("type", "function") == "function" and name:
            arguments = more.get("arguments")
        case _:
            form = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
            raise bad_request(f"{where}: {form} is expected", where)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, str | dict):
        raise bad_request(f"{where}.function.arguments: JSON as a text is expected", where)
    made: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": _object(arguments)}}
    if call.get("id") is not None:
        if not isinstance(call["id"], str):
            raise bad_request(f"{where}.id: a text is expected", where)
        made["id"] = call["id"]
    return made


def _object(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    """The arguments as an object; as the text that they are, where a model once wrote something else."""
    if isinstance(arguments, dict):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _content(content: Any, role: str, where: str, unknown: Unknown) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        raise bad_request(f"{where}: a text or a list of text parts is expected", where)
    return "".join(_part(part, f"{where}[{i}]", unknown) for i, part in enumerate(content))


def _part(part: Any, where: str, unknown: Unknown) -> str:
    if not isinstance(part, dict) or "type" not in part:
        raise bad_request(f'{where}: {{"type": "text", "text": ...}} is expected', where)
    if part["type"] != "text":
        raise bad_request(
            f"{where}: only text parts are supported, got {shortened(part['type'])}", where, "unsupported_field"
        )
    if not isinstance(part.get("text"), str):
        raise bad_request(f"{where}.text: a text is expected", f"{where}.text")
    for key, value in part.items():
        if key not in ("type", "text") and value is not None:
            unknown(key, where)
    return str(part["text"])


def _not_yet(where: str, what: str = "") -> ApiError:
    return bad_request(f"'{where}'{' ' + what if what else ''} is not supported yet", where, "unsupported_field")
