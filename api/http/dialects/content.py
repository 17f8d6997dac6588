"""What the requests of other forms share: text out of lists of parts, with errors that name the place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from api.errors import ApiError, bad_request, shortened
from api.http.bodies.dialects import SchemaFormat


def text_in(content: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """A text, or the joined texts of parts of the given kinds. Raises ApiError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where}: a text or a list of parts is expected, got {shortened(content)}", where)
    return "".join(part_text(part, f"{where}[{i}]", kinds) for i, part in enumerate(content))


def part_text(part: Any, where: str, kinds: Sequence[str]) -> str:
    """The text of a part of one of the given kinds. Raises ApiError."""
    kind = kind_of(part, where)
    if kind not in kinds:
        raise unsupported(where, kind, kinds)
    if not isinstance(part.get("text"), str):
        raise bad_request(f"{where}.text: a text is expected", f"{where}.text")
    return str(part["text"])


def kind_of(part: Any, where: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise bad_request(f'{where}: an object with a "type" is expected, got {shortened(part)}', where)
    return str(part["type"])


def string_in(part: dict[str, Any], key: str, where: str) -> str:
    if not isinstance(part.get(key), str):
        raise bad_request(f"{where}.{key}: a text is expected", f"{where}.{key}")
    return str(part[key])


def response_format(wanted: SchemaFormat | None) -> dict[str, Any] | None:
    """What a chat request calls it."""
    if wanted is None or wanted.type == "text":
        return None
    schema = {"json_schema": {"schema": wanted.schema_}} if wanted.type == "json_schema" else {}
    return {"type": wanted.type, **schema}


def continuation(messages: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Fields of a chat whose last message, if it is a text of the assistant's, is the beginning of the answer."""
    last = messages[-1]
    begun = last.get("role") == "assistant" and last.get("content") and not last.get("tool_calls")
    return {"add_generation_prompt": False, "continue_final_message": True} if begun else {}


def unsupported(where: str, kind: str, kinds: Sequence[str]) -> ApiError:
    expected = " or ".join(map(repr, kinds))
    return bad_request(f"{where}: {shortened(kind)} is not supported, only {expected}", where, "unsupported_field")


def renamed(field: str, words: Mapping[str, str]) -> str:
    """A chat's field in the words of another form; the first of them that fits."""
    for name, other in words.items():
        if field == name or field.startswith((f"{name}.", f"{name}[")):
            return other + field.removeprefix(name)
    return field


def in_words(error: ApiError, words: Mapping[str, str]) -> ApiError:
    """The error of a chat, of the request in another form that became it."""
    if error.param is None:
        return error
    param = renamed(error.param, words)
    message = error.message.replace(error.param, param)
    return ApiError(error.status, message, param=param, code=error.code, retry_after_s=error.retry_after_s)
