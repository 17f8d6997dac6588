"""From a request's bytes to a checked body; the first wrong field ends it."""

from __future__ import annotations

import codecs
import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from api.bodies.body import Body, Status, fields_of, parts_of
from api.errors import ApiError, UnreadableError, bad_request, shortened

_MAX_FIELDS = 256
_MAX_NAME = 100  # characters of a field's name that are looked at and shown
_MAX_DIGITS = 40
_MAX_REMARKS = 64
_PLACE_IN_LIST = r"\[\d+\]"
_OF_PARTS = ("value_error", "too_long", "too_short")  # what is wrong is in the value, or how many it has
_OTHER_TYPE = (
    "string_type", "list_type", "dict_type", "bool_type", "bool_parsing", "int_type", "int_parsing", "literal_error",
    "float_type", "float_parsing", "model_type", "model_attributes_type",
)  # fmt: skip
_NO_OBJECT = ("dict_type", "model_type", "model_attributes_type")

_Model = TypeVar("_Model", bound=Body)


@dataclass
class Notes:
    """Fields of a request that had no effect: those that nobody knows, and no-ops. `unknown_fields` "reject" makes the
    first a 400, "ignore" leaves them out here. `remarks`: what else became of parts of it, as sentences."""

    unknown_fields: str = "reject"
    unknown: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def remark(self, where: str, what: str) -> None:
        """`what` becomes of the place `where`. In a list it is noted once, whatever its place."""
        sentence = f"{re.sub(_PLACE_IN_LIST, '[]', where)}: {what}"
        if len(self.remarks) < _MAX_REMARKS and sentence not in self.remarks:
            self.remarks.append(sentence)

    def left_out(self, where: str, kind: str) -> None:
        self.remark(where, f"{shortened(kind[:_MAX_NAME])} is left out")

    def made_a_line(self, where: str, kind: str) -> None:
        self.remark(where, f"{shortened(kind[:_MAX_NAME])} became a line of text")

    def unreadable(self, error: UnreadableError) -> None:
        where = error.param or ""
        self.remark(where, f"left out: {error.message.removeprefix(where).removeprefix(': ')}")

    def found_unknown(self, key: str, where: str = "", known: Iterable[str] = ()) -> None:
        """In a list it is noted once, whatever its place. Raises ApiError that names the nearest of `known`."""
        prefix = where and f"{where}."
        if self.unknown_fields == "reject":
            near = difflib.get_close_matches(key[:_MAX_NAME], known, 1)
            hint = f"; did you mean {prefix + near[0]!r}?" if near else ""
            name = prefix + key[:_MAX_NAME]
            raise bad_request(f"unknown field {name!r}{hint}", name, "unknown_field")
        name = re.sub(_PLACE_IN_LIST, "[]", prefix) + key[:_MAX_NAME]
        if self.unknown_fields == "warn" and name not in self.unknown:
            self.unknown.append(name)


def parse(kind: type[_Model], raw: bytes, notes: Notes | None = None) -> _Model:
    """Raises ApiError 400 that names the first wrong field. `null` is the same as absent."""
    content, changed = _decode(raw)
    if changed and notes is not None:
        notes.remark("the body", "halves of surrogate pairs are read as U+FFFD")
    return parse_object(kind, content, notes)


def parse_object(kind: type[_Model], content: dict[str, Any], notes: Notes | None = None) -> _Model:
    """The same of a body that has been decoded."""
    known = _known(kind, content, "", notes or Notes())
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        raise readable(error, known) from None


def _decode(raw: bytes) -> tuple[dict[str, Any], bool]:
    """The object, and whether it was not taken to the letter."""
    try:
        return msgspec.json.decode(raw, type=dict[str, Any]), False
    except msgspec.ValidationError:  # no object, or a number that msgspec does not take: find out where it stands
        whole = _with_whole_pairs(raw)
        body = _decode_slowly(whole)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        whole = _with_whole_pairs(raw)
        if whole == raw:
            raise bad_request(f"the body is not a JSON object: {why_no_json(raw, error)}") from None
        return _decode(whole)[0], True
    if not isinstance(body, dict):
        raise bad_request(f"the body is not a JSON object but {shortened(body)}")
    return body, whole != raw


_HIGH, _LOW, _HEX = rb"u[dD][89abAB]", rb"u[dD][c-fC-F]", rb"[0-9a-fA-F]{2}"
_ESCAPE = re.compile(
    rb"\\(?:(?P<pair>" + _HIGH + _HEX + rb"\\" + _LOW + _HEX + rb")|(?P<half>u[dD][89a-fA-F]" + _HEX + rb")|.)",
    re.DOTALL,
)


def _with_whole_pairs(raw: bytes) -> bytes:
    """Escaped halves of surrogate pairs as U+FFFD: clients of JavaScript that cut a text may cut a character."""
    return _ESCAPE.sub(lambda found: rb"\ufffd" if found["half"] else found[0], raw)


def why_no_json(raw: bytes, error: Exception) -> str:
    """What is wrong with `raw`, of which a decoder said `error`."""
    if not raw.strip():
        return "it is empty"
    if raw.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in raw[:2]:
        return "send it as UTF-8 without a byte order mark"
    try:
        raw.decode()
    except UnicodeDecodeError as wrong:
        return f"it is not UTF-8: byte {wrong.start} is 0x{raw[wrong.start]:02x}"
    return str(error)


class _Outside:
    """A number of more digits than any field takes; no field's type."""

    def __init__(self, digits: str) -> None:
        self._digits = digits

    def __repr__(self) -> str:
        return f"{self._digits[:20]}... ({len(self._digits)} characters)"


def _decode_slowly(raw: bytes) -> Any:
    def integer(digits: str) -> Any:
        return int(digits) if len(digits) <= _MAX_DIGITS else _Outside(digits)

    try:
        return json.loads(raw, parse_int=integer)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not a JSON object: {why_no_json(raw, error)}") from None


def _present(body: dict[str, Any]) -> dict[str, Any]:
    if len(body) > _MAX_FIELDS:
        raise bad_request(f"{len(body)} fields are more than {_MAX_FIELDS}")
    return {key: value for key, value in body.items() if value is not None}


def _known(kind: type[Body], body: dict[str, Any], where: str, notes: Notes) -> dict[str, Any]:
    """The supported fields of a body, or of the field `where` of one, by their own names."""
    table, parts, prefix = fields_of(kind), parts_of(kind), where and f"{where}."
    kept: dict[str, Any] = {}
    for key, value in _present(body).items():
        known = table.get(key)
        if known is None:
            notes.found_unknown(key, where, table)
            continue
        if known.status is Status.SUPPORTED:
            part = parts.get(key)
            kept[key] = _known(part, value, prefix + key, notes) if part and isinstance(value, dict) else value
        elif known.of is not None:
            if (other := body.get(known.of)) is not None and other != value:
                raise bad_request(f"{prefix + key!r} and {prefix + known.of!r} are one field and differ", prefix + key)
            kept[known.of] = value
        elif not known.takes(value):
            only = f" (only {', '.join(map(shortened, known.values))})" if known.values else ""
            message = f"{prefix + key!r} is not supported{only}: {known.note}"
            raise bad_request(message, prefix + key, "unsupported_field")
        elif known.status is Status.NO_OP:
            notes.unused.append(prefix + key)
    return kept


def readable(error: ValidationError, content: Any) -> ApiError:
    """The first of pydantic's complaints about `content`, as a sentence that names field, value and range."""
    complaints = error.errors(include_url=False, include_context=False)
    found = [(_place(complaint["loc"], complaint["type"] == "missing", content), complaint) for complaint in complaints]
    location, first = found[0]
    told = [first]
    if location != first["loc"]:  # one of several types is taken: which comes nearest?
        members = [(place, complaint) for place, complaint in found if place[:1] == location[:1]]
        location, first = max(members, key=lambda member: (len(member[0]), member[1]["type"] not in _OTHER_TYPE))
        alike = [complaint for place, complaint in members if place == location and complaint["type"] in _OTHER_TYPE]
        told = alike if first["type"] in _OTHER_TYPE else [first]
    name = ".".join(str(part)[:_MAX_NAME] for part in location) or None
    kind, given = first["type"], first["input"]
    text = " or ".join(dict.fromkeys(map(_sentence, told))).replace(" or Input should be ", " or ")
    whole = isinstance(given, dict | list) and kind in _OF_PARTS
    shown = "" if whole or kind == "missing" else f", got {shortened(given)}"
    if name is None:
        return bad_request(text)
    return bad_request(f"{name}: {text[:1].lower()}{text[1:]}{shown}", name)


def _sentence(complaint: ErrorDetails) -> str:
    if complaint["type"] in _NO_OBJECT:
        return "Input should be an object"
    return complaint["msg"].removeprefix("Value error, ").replace(" after validation", "")


def _place(location: Sequence[int | str], missing: bool, content: Any) -> tuple[int | str, ...]:
    """Where in `content` a complaint is, of its last part if that is `missing`: pydantic names members of unions
    between."""
    place: list[int | str] = []
    for part in location:
        if isinstance(part, int):
            inside = isinstance(content, list) and part < len(content)
        else:
            inside = isinstance(content, dict) and part in content
        if inside:
            content = content[part]
            place.append(part)
    return (*place, *(location[-1:] if missing else ()))
