"""Calls as Qwen3-Coder writes them: <function=NAME> <parameter=KEY> VALUE </parameter> ... </function>."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from api.text.calls.reader import CallReader
from api.text.deltas import Delta, ToolArguments, ToolStart

_LONGEST_NAME = 256
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_NAME = re.compile(rf"([^<>\n]{{1,{_LONGEST_NAME}}})>")
_END_OF_VALUE, _END_OF_FUNCTION = "</parameter>", "</function>"


class XmlCalls(CallReader):
    """Values are texts: `parameters` (function -> parameter -> its JSON schema) says which of them stand for something
    else. A parameter's part of the arguments is given out once its value is whole."""

    def __init__(
        self,
        first: int,
        new_id: Callable[[], str],
        limit: int | None = None,
        *,
        parameters: Mapping[str, Mapping[str, Mapping[str, Any]]],
    ) -> None:
        super().__init__(first, new_id, limit)
        self._parameters = parameters
        self._buffer = ""
        self._searched = 0  # of the buffer, for the end of a value
        self._function: str | None = None
        self._key: str | None = None
        self._given = 0  # parameters

    @property
    def in_string(self) -> bool:
        return self._key is not None

    def push(self, text: str) -> list[Delta]:
        self._buffer += text
        self.read += len(text)
        deltas: list[Delta] = []
        while not (self.failed or self.full) and self._step(deltas):
            pass
        if self.failed:
            self.read -= len(self._buffer)
        return deltas

    def finish(self) -> list[Delta]:
        deltas: list[Delta] = []
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
        """Whether something was read."""
        if self._key is not None:
            return self._read_value(self._key, deltas)
        self._buffer = self._buffer.lstrip() if self.count or self._function is not None else self._buffer
        tag = _FUNCTION if self._function is None else _PARAMETER
        rest = self._buffer.lstrip()
        if rest.startswith(tag):
            name = _NAME.match(rest, len(tag))
            if name is None:
                return len(rest) > len(tag) + _LONGEST_NAME and self._skip()
            self._buffer = rest[name.end() :]
            self._begin(name[1].strip(), deltas)
            return True
        if self._function is not None and rest.startswith(_END_OF_FUNCTION):
            self._buffer = rest.removeprefix(_END_OF_FUNCTION)
            self._end_of_function(deltas)
            return True
        if tag.startswith(rest) or (self._function is not None and _END_OF_FUNCTION.startswith(rest)):
            return False
        return self._skip()

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
            self._key, self._searched = name, 0
            return
        self._function, self._given = name, 0
        deltas += ToolStart(self._index(), self.new_id(), name), ToolArguments(self._index(), "{")

    def _read_value(self, key: str, deltas: list[Delta]) -> bool:
        at = self._buffer.find(_END_OF_VALUE, self._searched)
        if at < 0:
            self._searched = max(0, len(self._buffer) - len(_END_OF_VALUE))
            return False
        value = self._buffer[:at].removeprefix("\n").removesuffix("\n")
        self._buffer, self._key = self._buffer[at + len(_END_OF_VALUE) :], None
        schema = self._parameters.get(self._function or "", {}).get(key)
        written = f"{json.dumps(key, ensure_ascii=False)}: {_json_of(value, schema)}"
        deltas.append(ToolArguments(self._index(), (", " if self._given else "") + written))
        self._given += 1
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
