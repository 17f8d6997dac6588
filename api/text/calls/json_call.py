"""Calls written as JSON objects with a name and arguments, read while they come."""

from __future__ import annotations

import json
from collections.abc import Callable

from api.text.calls.reader import CallReader
from api.text.deltas import Delta, ToolArguments, ToolStart

_SPACE = " \t\r\n"
_SEPARATORS = _SPACE + ",;[]"  # between objects: some models write lists, others semicolons
_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("type", "id", "description")  # what may stand before the name


class JsonValue:
    """Finds the end of one JSON value. It does not check what is inside."""

    def __init__(self, first: str) -> None:
        self.kind = first
        self._depth = int(first in "{[")
        self.in_string = first == '"'
        self._escaped = False

    def ends(self, char: str) -> bool | None:
        """Whether the value ends with `char`; None: it ended before."""
        if self.in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self.in_string = False
                return not self._depth
            return False
        if not self._depth and self.kind not in '{["':  # a number, true, false, null
            return None if char in _SPACE or char in ",}]" else False
        if char == '"':
            self.in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return not self._depth
        return False


class JsonCalls(CallReader):
    """`{"name": ..., "arguments": {...}}`, one or several. Arguments are given out as they are written. `enclosed`: a
    marker ends them, so what else stands before it is left out; if not, it is text, and so is an object that begins
    with another field."""

    def __init__(
        self, first: int, new_id: Callable[[], str], limit: int | None = None, *, enclosed: bool = True
    ) -> None:
        super().__init__(first, new_id, limit)
        self._enclosed = enclosed
        self._place = "between"  # objects, or in one: at a key, its colon, a value; or what is left is ignored
        self._value: JsonValue | None = None
        self._text: list[str] = []  # of the value
        self._key: str | None = None
        self._begin()

    def _begin(self) -> None:
        self._started = False
        self._given = False  # arguments, whole or in part
        self._early: list[str] = []  # arguments that came before the name

    @property
    def in_string(self) -> bool:
        return self._value is not None and self._value.in_string

    def push(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        for char in text:
            if self.failed or self.full:
                break
            self._take(char, deltas)
            self.read += not self.failed
        if self._streams and self._text:
            self._arguments("".join(self._text), deltas)
            self._text.clear()
        return deltas

    def _take(self, char: str, deltas: list[Delta]) -> None:
        if self._value is None:
            return self._outside(char, deltas)
        end = self._value.ends(char)
        if end is not None:
            self._text.append(char)
        if end is not False:
            self._end_of_value(deltas)
        if end is None:
            self._outside(char, deltas)

    def finish(self) -> list[Delta]:
        """An object that was cut off keeps what it has; a call without a name is no call."""
        deltas: list[Delta] = []
        if self._place != "between":
            if not self._started:
                self._fail()
            else:
                if self._value is not None and self._place == "value" and self._key in _ARGUMENTS:
                    self._arguments("".join(self._text), deltas)
                self.count += 1
        elif self.count == 0:
            self._fail()
        return deltas

    def _fail(self) -> None:
        if self._enclosed and self.count:
            self._place = "ignored"
        else:
            self.failed = True

    @property
    def _streams(self) -> bool:
        streamed = self._started and self._place == "value" and self._key in _ARGUMENTS
        return streamed and self._value is not None and self._value.kind == "{"

    def _outside(self, char: str, deltas: list[Delta]) -> None:
        """A character that belongs to no value."""
        match self._place, char:
            case "between", "{":
                self._begin()
                self._place = "key"
            case "between", _ if char in _SEPARATORS:
                pass
            case "ignored", _:
                pass
            case _, _ if char in _SPACE:
                pass
            case ("key", '"') | ("value", _):
                self._value, self._text = JsonValue(char), [char]
            case "key", "}":
                self._end_of_object(char, deltas)
            case "key", ",":
                pass
            case "colon", ":":
                self._place = "value"
            case (("key" | "colon"), _) if self._started:  # the name stands; what is wrong after it does not count
                self._end_of_object(char, deltas)
            case _:
                self._fail()

    def _end_of_value(self, deltas: list[Delta]) -> None:
        value, text = self._value, "".join(self._text)
        self._value, self._text = None, []
        if self._place == "key":
            self._key, self._place = _string(text), "colon"
            if not self._enclosed and not self._started and self._key not in ("name", *_ARGUMENTS, *_OTHERS):
                self.failed = True
            return
        self._place = "key"
        if self._key == "name" and not self._started:
            name = _string(text)
            if not name:
                return self._fail()
            self._started = True
            deltas.append(ToolStart(self._index(), self.new_id(), name))
            if self._early:
                self._arguments("".join(self._early), deltas)
        elif self._key in _ARGUMENTS and value is not None:
            if value.kind == '"':  # an object within a string
                text = _string(text) or "{}"
            elif text == "null":
                text = "{}"
            if self._started:
                self._arguments(text, deltas)
            else:
                self._early.append(text)

    def _end_of_object(self, char: str, deltas: list[Delta]) -> None:
        self._place = "between"
        if not self._started:
            return self._fail()
        if not self._given:
            self._arguments("{}", deltas)
        self.count += 1
        self.consumed = self.read + (char == "}")

    def _arguments(self, text: str, deltas: list[Delta]) -> None:
        self._given = True
        deltas.append(ToolArguments(self._index(), text))


def _string(text: str) -> str | None:
    """The text of a JSON string; None if it is none."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
