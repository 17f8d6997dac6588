"""An answer's text, cut into reasoning, calls of tools, and the rest, as it comes.

What may still become a part of a marker is held back, and so is the white space that a marker would swallow. The deltas
of a text are the same however it was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from api.text.calls.formats import HARMONY_MARKERS, ToolFormat
from api.text.calls.reader import CallReader
from api.text.deltas import Delta, Reasoning, Text

THINK, END_THINK = "<think>", "</think>"
_MOST_SPACE = 64  # characters of white space that are held back


@dataclass(frozen=True)
class Layout:
    """What to look for. `thinks`: reasoning may come first; `thinking`: it has begun in the prompt. `show_reasoning`
    False: it is left out. `tools`: the form of calls, None for none; `max_calls`: the answer ends after that many.
    `channels`: the answer is in harmony's; `begun`: a final text has begun in the prompt."""

    thinks: bool = False
    thinking: bool = False
    show_reasoning: bool = True
    tools: ToolFormat | None = None
    parameters: dict[str, dict[str, Any]] = field(default_factory=dict)
    max_calls: int | None = None
    channels: bool = False
    begun: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Control tokens among them are looked for too."""
        if self.channels:
            return HARMONY_MARKERS
        tools = () if self.tools is None else self.tools.markers
        return (*((THINK, END_THINK) if self.thinks else ()), *tools)

    def __bool__(self) -> bool:
        return self.thinks or self.channels or self.tools is not None


class StateMachine:
    """Of one answer: a state takes what is certain off the buffer and says whether the next one may go on. `ended`: it
    has `max_calls` calls; what comes after them does not count."""

    _state: Callable[[list[Delta]], bool]

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._buffer = ""
        self._final = False
        self.calls = 0
        self.ended = False

    def push(self, text: str) -> list[Delta]:
        self._buffer += text
        deltas: list[Delta] = []
        while not self.ended and self._state(deltas):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        """The text has ended: what was held back."""
        self._final = True
        return self.push("")

    def _held(self, *markers: str) -> int:
        """Length of the buffer's end that may become one of the markers."""
        if self._final or not markers:
            return 0
        longest = min(max(map(len, markers)) - 1, len(self._buffer))
        ends = (n for n in range(longest, 0, -1) if any(mark.startswith(self._buffer[-n:]) for mark in markers))
        return next(ends, 0)


class Segments(StateMachine):
    """Of an answer that is reasoning, then text with calls in it."""

    def __init__(self, layout: Layout, new_id: Callable[[], str] | None = None) -> None:
        super().__init__(layout)
        self._new_id = new_id
        self._state = self._reasoning if layout.thinking else self._start if layout.thinks else self._first
        self._fresh = layout.thinking  # reasoning has just begun or ended: new-lines go
        self._reader: CallReader | None = None
        self._raw: list[str] = []  # what the reader was given
        self._before = ""  # the character before the buffer, in a call

    @property
    def reasons(self) -> bool:
        """Whether the text so far ends in reasoning."""
        return self._state == self._reasoning

    @property
    def apart(self) -> bool:
        """Whether the text so far ends in reasoning or in calls."""
        return self._state in (self._reasoning, self._call)

    @property
    def says(self) -> bool:
        """Whether it ends in text that is neither."""
        return self._state == self._text

    # ---- states

    def _start(self, deltas: list[Delta]) -> bool:
        """Nothing has come: is it reasoning?"""
        text = self._buffer.lstrip()
        space = len(self._buffer) - len(text)
        if space <= _MOST_SPACE and text.startswith(THINK):
            self._buffer = text.removeprefix(THINK)
            self._fresh, self._state = True, self._reasoning
        elif space <= _MOST_SPACE and THINK.startswith(text) and not self._final:
            return False
        else:
            self._state = self._first
        return True

    def _reasoning(self, deltas: list[Delta]) -> bool:
        if self._fresh:
            self._buffer = self._buffer.lstrip("\n")
        before, found = self._until(END_THINK)
        self._fresh = self._fresh and not before
        if self._layout.show_reasoning:
            deltas.append(Reasoning(before))
        if found:
            self._fresh, self._state = True, self._first
        return found

    def _first(self, deltas: list[Delta]) -> bool:
        """The text begins: is it a call without a marker?"""
        tools = self._layout.tools
        if self._fresh:
            self._buffer = self._buffer.lstrip("\n")
        if tools is not None and tools.bare:
            text = self._buffer.lstrip()
            if not text and not self._final and len(self._buffer) <= _MOST_SPACE:
                return False
            if text.startswith("{") and len(self._buffer) - len(text) <= _MOST_SPACE:
                self._buffer = text
                return self._begin_calls("", tools)
        if not self._buffer:
            return False
        self._state = self._text
        return True

    def _text(self, deltas: list[Delta]) -> bool:
        tools = self._layout.tools
        if tools is None:
            deltas.append(Text(self._buffer))
            self._buffer = ""
            return False
        before, found = self._until(tools.opens)
        deltas.append(Text(_without_space(before) if self._final and self.calls else before))
        return self._begin_calls(tools.opens, tools) if found else False

    def _begin_calls(self, opens: str, tools: ToolFormat) -> bool:
        most = self._layout.max_calls
        left = None if most is None else most - self.calls
        self._reader = tools.reader(self.calls, self._layout.parameters, left, self._new_id)
        self._raw = [opens]
        self._before, self._state = "", self._call
        return True

    def _call(self, deltas: list[Delta]) -> bool:
        reader, tools = self._reader, self._layout.tools
        assert reader is not None and tools is not None  # _begin_calls
        at = -1 if tools.closes is None else self._buffer.find(tools.closes)
        end = at if at >= 0 else len(self._buffer) - self._held(*filter(None, [tools.closes]))
        self._give(reader, end, deltas)
        if reader.failed:
            return self._give_up(reader, deltas)
        if reader.full:
            self._end_calls(reader)
            return False
        if at >= 0:
            assert tools.closes is not None  # it was found
            if reader.in_string and self._before != "\n":  # JSON strings hold no plain newlines
                self._give(reader, len(tools.closes), deltas)
                return True
        elif not self._final:
            return False
        deltas += reader.finish()
        if reader.failed:
            return self._give_up(reader, deltas)
        if tools.closes is not None and at >= 0:
            self._buffer = self._buffer[len(tools.closes) :]
        self._end_calls(reader)
        return bool(self._buffer)

    # ---- helpers

    def _give(self, reader: CallReader, length: int, deltas: list[Delta]) -> None:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        if text:
            self._before = text[-1]
            self._raw.append(text)
            deltas += reader.push(text)

    def _give_up(self, reader: CallReader, deltas: list[Delta]) -> bool:
        """What was read is no call after all."""
        opens, raw = self._raw[0], "".join(self._raw[1:])
        deltas.append(Text(("" if reader.count else opens) + raw[reader.consumed : reader.read]))
        self._buffer = raw[reader.read :] + self._buffer
        self._end_calls(reader)
        return bool(self._buffer)

    def _end_calls(self, reader: CallReader) -> None:
        self.calls += reader.count
        self._reader, self._raw, self._state = None, [], self._text
        self.ended = reader.full

    def _until(self, marker: str) -> tuple[str, bool]:
        """Take the text before a marker off the buffer, with the marker if it is there; white space next to it goes."""
        at = self._buffer.find(marker)
        if at >= 0:
            text, self._buffer = self._buffer[:at], self._buffer[at + len(marker) :]
            return _without_space(text), True
        if self._final:
            text, self._buffer = self._buffer, ""
            return text, False
        text = self._buffer[: len(self._buffer) - self._held(marker)]
        text = _without_space(text)
        self._buffer = self._buffer[len(text) :]
        return text, False


def _without_space(text: str) -> str:
    """Without at most `_MOST_SPACE` characters of white space at its end."""
    bare = text.rstrip()
    return bare if len(text) - len(bare) <= _MOST_SPACE else text[:-_MOST_SPACE]
