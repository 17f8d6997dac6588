"""What the requests of other forms share: text out of lists of parts, with errors that name the place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from api.errors import ApiError, bad_request, shortened


def text_in(content: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """A text, or the joined texts of parts of the given kinds. Raises ApiError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where}: a text or a list of parts is expected, got {shortened(content)}", where)
    return "".join(part_text(part, f"{where}[{i}]", kinds) for i, part in enumerate(content))


def part_text(part: Any, where: str, kinds: Sequence[str]) -> str:
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


def unsupported(where: str, kind: str, kinds: Sequence[str]) -> ApiError:
    expected = " or ".join(map(repr, kinds))
    return bad_request(f"{where}: {shortened(kind)} is not supported, only {expected}", where, "unsupported_field")
