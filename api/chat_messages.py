"""The messages of a chat request, checked and brought into the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from api.errors import ApiError, bad_request

_FIELDS = {"role", "content", "name", "reasoning_content"}
_NOT_YET = {"tool_calls", "function_call", "tool_call_id", "audio", "refusal"}
_ECHOED = {"annotations"}  # what an answer carries and clients send back; empty here
_ROLES = {"system", "user", "assistant"}


def normalise(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Content parts joined to text, `developer` as `system`, null fields left out.
    Raises ApiError 400 naming messages[i].field."""
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    fields = {key: value for key, value in message.items() if value is not None}
    for key in fields:
        if key in _NOT_YET or (key in _ECHOED and fields[key]):
            if fields[key] not in ([], ""):
                raise _not_yet(f"{where}.{key}")
        elif key not in _FIELDS | _ECHOED:
            raise bad_request(f"unknown field '{where}.{key}'", f"{where}.{key}", "unknown_field")
    role = fields.get("role")
    if role == "developer":  # OpenAI's newer name
        role = "system"
    if role in ("tool", "function"):
        raise _not_yet(f"{where}.role", repr(role))
    if role not in _ROLES:
        raise bad_request(f"{where}.role: 'system', 'user' or 'assistant' is expected, got {role!r}", f"{where}.role")
    result: dict[str, Any] = {"role": role, "content": _content(fields.get("content"), role, f"{where}.content")}
    for key in ("name", "reasoning_content"):
        if key in fields:
            if not isinstance(fields[key], str):
                raise bad_request(f"{where}.{key}: a text is expected", f"{where}.{key}")
            result[key] = fields[key]
    return result


def _content(content: Any, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        raise bad_request(f"{where}: a text or a list of text parts is expected", where)
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or "type" not in part:
        raise bad_request(f'{where}: {{"type": "text", "text": ...}} is expected', where)
    if part["type"] != "text":
        raise bad_request(f"{where}: only text parts are supported, got {part['type']!r}", where, "unsupported_field")
    if not isinstance(part.get("text"), str):
        raise bad_request(f"{where}.text: a text is expected", f"{where}.text")
    unknown = [key for key, value in part.items() if key not in ("type", "text") and value is not None]
    if unknown:
        raise bad_request(f"unknown field '{where}.{unknown[0]}'", f"{where}.{unknown[0]}", "unknown_field")
    return str(part["text"])


def _not_yet(where: str, what: str = "") -> ApiError:
    return bad_request(f"'{where}'{' ' + what if what else ''} is not supported yet", where, "unsupported_field")
