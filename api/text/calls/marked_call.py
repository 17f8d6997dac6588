"""Calls whose parts stand between tokens of their own, as DeepSeek and Kimi K2 write them.

<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>                              DeepSeek V3.1
<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME ```json {...} ```<｜tool▁call▁end｜>         DeepSeek V3, R1 (in lines)
<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>{...}<|tool_call_end|>   Kimi K2
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from api.text.calls.json_call import JsonValue
from api.text.calls.reader import SteppedReader
from api.text.deltas import Delta, ToolArguments, ToolStart

_LONGEST_NAME = 256
_NUMBERED = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)
NUMBERED_ID = re.compile(r"functions\.(.+):(\d+)")


@dataclass(frozen=True)
class Marks:
    """A call stands between `begin` and `end`. `separator` stands between its name and its arguments; where there is a
    `kind`, between that and a line with the name. `fence`: what stands around the arguments. `between`: calls.
    `numbered`: the name is `functions.NAME:NUMBER`, and all of that is the call's id."""

    begin: str
    separator: str
    end: str
    kind: str = ""
    fence: tuple[str, str] = ("", "")
    between: str = ""
    numbered: bool = False

    @property
    def all(self) -> tuple[str, str, str]:
        """Control tokens among them are looked for."""
        return self.begin, self.separator, self.end

    def around(self, name: str) -> tuple[str, str]:
        """What a call of `name` has before its arguments, and behind them; without a number."""
        if not self.kind:
            return f"{self.begin}{name}{self.separator}", self.end
        before, after = self.fence
        return f"{self.begin}{self.kind}{self.separator}{name}\n{before}\n", f"\n{after}{self.end}"


DEEPSEEK_MARKS = Marks("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
DEEPSEEK_V3_MARKS = Marks(*DEEPSEEK_MARKS.all, kind="function", fence=("```json", "```"), between="\n")
KIMI_MARKS = Marks("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", numbered=True)


class MarkedCalls(SteppedReader):
    """Arguments that are an object are given out as they are written, others once they are whole."""

    def __init__(self, first: int, new_id: Callable[[], str], limit: int | None = None, *, marks: Marks) -> None:
        super().__init__(first, new_id, limit)
        self._marks = marks
        self._state: Callable[[list[Delta]], bool] = self._between
        self._value: JsonValue | None = None  # the arguments, while they come
        self._ids: set[str] = set()

    @property
    def in_string(self) -> bool:
        return self._value is not None and self._value.in_string

    def finish(self) -> list[Delta]:
        """A call that was cut off keeps what it has; one without a name is none."""
        deltas: list[Delta] = []
        if self._state in (self._before_arguments, self._arguments, self._other_arguments):
            deltas.append(ToolArguments(self._index(), self._without_fence(self._buffer)))
        if self._state not in (self._between, self._name, self._name_behind):
            self.count += 1
        elif self.count == 0:
            self.failed = True
        return deltas

    def _step(self, deltas: list[Delta]) -> bool:
        return self._state(deltas)

    # ---- states: each says whether it has read something

    def _between(self, deltas: list[Delta]) -> bool:
        begin, rest = self._marks.begin, self._buffer.lstrip()
        if rest.startswith(begin):
            return self._go_on(rest.removeprefix(begin), self._name)
        if begin.startswith(rest):
            return False
        if not self.count:
            self.failed = True
            return False
        at = self._buffer.find(begin[0], 1)
        self._buffer = self._buffer[at:] if at >= 0 else ""
        return True

    def _name(self, deltas: list[Delta]) -> bool:
        if (found := self._until(self._marks.separator)) is None:
            return self._state != self._name
        name, rest = found
        if self._marks.kind:
            return self._go_on(rest, self._name_behind)
        return self._begin(name, rest, deltas)

    def _name_behind(self, deltas: list[Delta]) -> bool:
        if (found := self._until("\n")) is None:
            return self._state != self._name_behind
        return self._begin(*found, deltas)

    def _begin(self, written: str, rest: str, deltas: list[Delta]) -> bool:
        written = written.strip()
        numbered = _NUMBERED.fullmatch(written) if self._marks.numbered else None
        name = written if numbered is None else numbered[1]
        if not name:
            return self._no_call()
        known = NUMBERED_ID.fullmatch(written) and self._marks.numbered and written not in self._ids
        call_id = written if known else self.new_id()
        self._ids.add(call_id)
        deltas.append(ToolStart(self._index(), call_id, name))
        return self._go_on(rest, self._before_arguments)

    def _before_arguments(self, deltas: list[Delta]) -> bool:
        fence, rest = self._marks.fence[0], self._buffer.lstrip()
        if fence.startswith(rest) and rest != fence:
            return False
        return self._go_on(rest.removeprefix(fence), self._arguments)

    def _arguments(self, deltas: list[Delta]) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        if self._buffer[0] != "{":
            return self._go_on(self._buffer, self._other_arguments)
        self._value = JsonValue("{")
        deltas.append(ToolArguments(self._index(), "{"))
        return self._go_on(self._buffer[1:], self._object)

    def _object(self, deltas: list[Delta]) -> bool:
        value = self._value
        assert value is not None  # _arguments
        end = None
        for i, char in enumerate(self._buffer):
            if char == self._marks.end[0] and not value.in_string:  # no part of JSON: the object was not closed
                end = i
                break
            if value.ends(char):
                end = i + 1
                break
        if written := self._buffer[:end]:
            deltas.append(ToolArguments(self._index(), written))
        if end is None:
            self._buffer = ""
            return False
        self._value = None
        return self._go_on(self._buffer[end:], self._after)

    def _other_arguments(self, deltas: list[Delta]) -> bool:
        at = self._end_of_call()
        if at < 0:
            self._searched = max(0, len(self._buffer) - max(len(self._marks.end), len(self._marks.begin)))
            return False
        deltas.append(ToolArguments(self._index(), self._without_fence(self._buffer[:at])))
        return self._go_on(self._buffer[at:], self._after)

    def _after(self, deltas: list[Delta]) -> bool:
        at = self._end_of_call()
        if at < 0:
            self._buffer = self._buffer[-max(map(len, self._marks.all)) :]
            return False
        self.count += 1
        return self._go_on(self._buffer[at:].removeprefix(self._marks.end), self._between)

    def _end_of_call(self) -> int:
        """Where its mark stands, or that of another one; -1: not yet."""
        marks = (self._marks.end, self._marks.begin)
        return min((at for mark in marks if (at := self._buffer.find(mark, self._searched)) >= 0), default=-1)

    # ---- helpers

    def _go_on(self, rest: str, state: Callable[[list[Delta]], bool]) -> bool:
        self._buffer, self._searched, self._state = rest, 0, state
        return True

    def _until(self, mark: str) -> tuple[str, str] | None:
        """A name, and the text behind the mark that ends it. None: it has not ended, or is none."""
        at = self._buffer.find(mark)
        if at > _LONGEST_NAME or (at < 0 and len(self._buffer) >= _LONGEST_NAME + len(mark)):
            self._no_call()
            return None
        return None if at < 0 else (self._buffer[:at], self._buffer[at + len(mark) :])

    def _no_call(self) -> bool:
        """What follows is looked at for another one, if there was one before."""
        self.failed = not self.count
        return self._go_on(self._buffer, self._between)

    def _without_fence(self, text: str) -> str:
        begin, end = self._marks.fence
        text = text.strip().removeprefix(begin).removesuffix(end).strip()
        return "{}" if text in ("", "null") else text
