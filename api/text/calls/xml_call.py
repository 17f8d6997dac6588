"""Calls written in tags, as Qwen3-Coder, MiniMax-M2 and GLM-4.5 do.

<function=NAME> <parameter=KEY> VALUE </parameter> ... </function>
<invoke name="NAME"> <parameter name="KEY"> VALUE </parameter> ... </invoke>
NAME <arg_key> KEY </arg_key> <arg_value> VALUE </arg_value> ...
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from api.text.calls.reader import SteppedReader
from api.text.deltas import Delta, ToolArguments, ToolStart

_LONGEST_NAME = 256
_BARE_NAME = re.compile(rf"([\w.:-]{{1,{_LONGEST_NAME}}})(?=[\s<])")  # one without tags around it


@dataclass(frozen=True)
class Tags:
    """`function` and `parameter`: what stands before and behind their names; empty for a function that is a bare name.
    `value` is what a value begins with, behind white space, if anything does. `end_of_function` empty: it ends where
    calls end. `lines`: a new-line next to a value is none of it."""

    function: tuple[str, str]
    parameter: tuple[str, str]
    end_of_value: str
    end_of_function: str = ""
    value: str = ""
    lines: bool = True

    @property
    def all(self) -> tuple[str, ...]:
        """Control tokens among them are looked for."""
        return (*self.parameter, self.value, self.end_of_value)

    @cached_property
    def function_name(self) -> re.Pattern[str]:
        return _name(self.function[1]) if self.function[0] else _BARE_NAME

    @cached_property
    def parameter_name(self) -> re.Pattern[str]:
        return _name(self.parameter[1])


def _name(behind: str) -> re.Pattern[str]:
    return re.compile(rf"([^<>\"\n]{{1,{_LONGEST_NAME}}}){re.escape(behind)}")


QWEN_TAGS = Tags(("<function=", ">"), ("<parameter=", ">"), "</parameter>", "</function>")
MINIMAX_TAGS = Tags(('<invoke name="', '">'), ('<parameter name="', '">'), "</parameter>", "</invoke>")
GLM_TAGS = Tags(("", ""), ("<arg_key>", "</arg_key>"), "</arg_value>", value="<arg_value>", lines=False)


class XmlCalls(SteppedReader):
    """Values are texts: `parameters` (function -> parameter -> its JSON schema) says which of them stand for something
    else. A parameter's part of the arguments is given out once its value is whole."""

    def __init__(
        self,
        first: int,
        new_id: Callable[[], str],
        limit: int | None = None,
        *,
        tags: Tags,
        parameters: Mapping[str, Mapping[str, Mapping[str, Any]]],
    ) -> None:
        super().__init__(first, new_id, limit)
        self._tags = tags
        self._parameters = parameters
        self._function: str | None = None
        self._key: str | None = None
        self._in_value = False  # what a value begins with has come
        self._given = 0  # parameters

    @property
    def in_string(self) -> bool:
        return self._in_value

    def finish(self) -> list[Delta]:
        deltas: list[Delta] = []
        if self._function is None and (name := self._tags.function_name.match(f"{self._buffer.strip()}\n")):
            self._begin(name[1], deltas)  # a bare name may end here
        if self._function is not None:
            if self._key is None:
                self._end_of_function(deltas)
            else:  # cut off within a value: so are the arguments
                self._function = None
                self.count += 1
        elif self.count == 0:
            self.failed = True
        return deltas

    def _step(self, deltas: list[Delta]) -> bool:
        if self._key is not None:
            return self._read_value(self._key, deltas)
        self._buffer = self._buffer.lstrip() if self.count or self._function is not None else self._buffer
        tags = self._tags
        outside, end = self._function is None, tags.end_of_function
        tag, pattern = (tags.function[0], tags.function_name) if outside else (tags.parameter[0], tags.parameter_name)
        rest = self._buffer.lstrip()
        if rest.startswith(tag):
            name = pattern.match(rest, len(tag))
            if name is None:
                return self._never(rest, tag, pattern) and self._skip()
            self._buffer = rest[name.end() :]
            self._begin(name[1].strip(), deltas)
            return True
        if not outside and end and rest.startswith(end):
            self._buffer = rest.removeprefix(end)
            self._end_of_function(deltas)
            return True
        if tag.startswith(rest) or (not outside and end.startswith(rest)):
            return False
        return self._skip()

    def _never(self, rest: str, tag: str, pattern: re.Pattern[str]) -> bool:
        """Whether no name can come to stand here any more."""
        if pattern is not _BARE_NAME:
            return len(rest) > len(tag) + _LONGEST_NAME + len(self._tags.parameter[1])
        return bool(rest) and not _BARE_NAME.match(f"{rest}\n")

    def _skip(self) -> bool:
        """What stands here is none of the tags: no call, unless there was one."""
        if self._function is None and not self.count:
            self.failed = True
            return False
        at = self._buffer.find("<", 1)
        self._buffer = self._buffer[at:] if at >= 0 else ""
        return True

    def _begin(self, name: str, deltas: list[Delta]) -> None:
        if self._function is not None:
            self._key, self._searched, self._in_value = name, 0, not self._tags.value
            return
        self._function, self._given = name, 0
        deltas += ToolStart(self._index(), self.new_id(), name), ToolArguments(self._index(), "{")

    def _read_value(self, key: str, deltas: list[Delta]) -> bool:
        end = self._tags.end_of_value
        if not self._in_value:
            return self._begin_value()
        at = self._buffer.find(end, self._searched)
        if at < 0:
            self._searched = max(0, len(self._buffer) - len(end))
            return False
        value = self._buffer[:at]
        value = value.removeprefix("\n").removesuffix("\n") if self._tags.lines else value
        self._buffer, self._key, self._in_value = self._buffer[at + len(end) :], None, False
        schema = self._parameters.get(self._function or "", {}).get(key)
        written = f"{json.dumps(key, ensure_ascii=False)}: {_json_of(value, schema)}"
        deltas.append(ToolArguments(self._index(), (", " if self._given else "") + written))
        self._given += 1
        return True

    def _begin_value(self) -> bool:
        """A key without a value is skipped."""
        self._buffer = self._buffer.lstrip()
        value = self._tags.value
        if self._buffer.startswith(value):
            self._buffer, self._in_value = self._buffer.removeprefix(value), True
            return True
        if value.startswith(self._buffer):
            return False
        self._key = None
        return True

    def _end_of_function(self, deltas: list[Delta]) -> None:
        deltas.append(ToolArguments(self._index(), "}"))
        self._function = None
        self.count += 1


def _json_of(value: str, schema: Mapping[str, Any] | None) -> str:
    """A value as JSON: a text, unless the schema wants something else and the value is that."""
    kinds = _types(schema)
    if kinds and "string" not in kinds:
        try:
            return json.dumps(json.loads(value), ensure_ascii=False)
        except ValueError:
            if value.strip() in ("True", "False", "None"):
                return {"True": "true", "False": "false", "None": "null"}[value.strip()]
    return json.dumps(value, ensure_ascii=False)


def _types(schema: Mapping[str, Any] | None) -> set[str]:
    """The types that a schema names, at its top level and in its alternatives."""
    if not isinstance(schema, dict):
        return set()
    given = schema.get("type")
    names = {given} if isinstance(given, str) else set(given) if isinstance(given, list) else set()
    for alternative in [*schema.get("anyOf", ()), *schema.get("oneOf", ())]:
        names |= _types(alternative)
    return names
