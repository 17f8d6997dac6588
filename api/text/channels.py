"""An answer in harmony's channels, cut into reasoning, calls of tools, and the rest, as it comes.

What stands in `analysis` is reasoning; a message to `functions.NAME` is a call if there are tools; all else is text.
The deltas of a text are the same however it was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from api.text.calls.formats import CALL, CHANNEL, END, HARMONY, MESSAGE, RETURN, START
from api.text.deltas import Delta, Reasoning, Text, ToolArguments, ToolStart
from api.text.segments import Layout, Segments, StateMachine

_LONGEST_HEADER = 512
_ENDS = (END, CALL, RETURN)
_BREAKS = (*_ENDS, START, CHANNEL)
_BREAK = re.compile("|".join(map(re.escape, _BREAKS)))
_HEADS = (CHANNEL, MESSAGE, "to=", "assistant")  # what a header begins with
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")


class Channels(StateMachine):
    """Of an answer that is messages in channels. Texts of several messages have an empty line between them."""

    def __init__(self, layout: Layout, new_id: Callable[[], str] = HARMONY.new_id) -> None:
        super().__init__(layout)
        self._new_id = new_id
        self._kind: type[Text | Reasoning | ToolArguments] = Text  # of the message that has begun
        self._state = self._body if layout.begun else self._header
        self._announced = False  # the header stands behind a <|start|>
        self._given: set[type] = set()  # kinds of which there was something
        self._begun = layout.begun  # something of this message has been given

    @property
    def reasons(self) -> bool:
        """Whether the text so far ends in reasoning."""
        return self._state == self._body and self._kind is Reasoning

    @property
    def says(self) -> bool:
        """Whether it ends in text that is neither reasoning, a call nor a header."""
        return self._state == self._body and self._kind is Text

    @property
    def apart(self) -> bool:
        return not self.says

    def finish(self) -> list[Delta]:
        deltas = super().finish()
        if self._state == self._body and not self.ended:
            self._close(deltas)
            self._state = self._between
        return deltas

    # ---- states

    def _header(self, deltas: list[Delta]) -> bool:
        rest, at = self._buffer.lstrip(), self._buffer.find(MESSAGE)
        known = self._announced or any(rest.startswith(head) or head.startswith(rest) for head in _HEADS)
        if known and at < 0 and len(self._buffer) < _LONGEST_HEADER + len(MESSAGE) and not self._final:
            return False
        if not known or at > _LONGEST_HEADER or at < 0:  # no header at all, or one that was cut off
            if self._announced:
                self._buffer = self._buffer[_LONGEST_HEADER + len(MESSAGE) :]
            elif self._final and known and "<|" in rest:
                self._buffer = ""
            self._open("", deltas)
            if rest.startswith(CHANNEL) and self._buffer:  # it is text, and would be taken for a header again
                taken = len(self._buffer) - len(rest) + len(CHANNEL)
                self._give(self._buffer[:taken], deltas)
                self._buffer = self._buffer[taken:]
            return True
        header, self._buffer = self._buffer[:at], self._buffer[at + len(MESSAGE) :]
        return self._open(header, deltas)

    def _body(self, deltas: list[Delta]) -> bool:
        found = _BREAK.search(self._buffer)
        end = len(self._buffer) - self._held(*_BREAKS) if found is None else found.start()
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        if text:
            self._give(text, deltas)
        if found is None:
            return False
        self._close(deltas)
        self._state = self._between
        return True

    def _between(self, deltas: list[Delta]) -> bool:
        self._buffer = self._buffer.lstrip()
        for mark in (START, *_ENDS):
            if self._buffer.startswith(mark):
                self._buffer = self._buffer.removeprefix(mark)
                if mark == START:
                    self._announced, self._state = True, self._header
                return True
        if any(mark.startswith(self._buffer) for mark in (*_BREAKS, MESSAGE)) and not self._final:
            return False
        if not self._buffer:
            return False
        self._announced, self._state = False, self._header
        return True

    # ---- helpers

    def _open(self, header: str, deltas: list[Delta]) -> bool:
        """A message begins."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._begun, self._state = False, self._body
        if recipient is not None and self._layout.tools is not None:
            self._kind = ToolArguments
            deltas.append(ToolStart(self.calls, self._new_id(), recipient[1]))
        else:
            self._kind = Reasoning if channel is not None and channel[1] == "analysis" else Text
        return True

    def _give(self, text: str, deltas: list[Delta]) -> None:
        kind = self._kind
        if kind is ToolArguments:
            deltas.append(ToolArguments(self.calls, text))
        else:
            gap = "\n\n" if kind in self._given and not self._begun else ""
            if kind is Text:
                deltas.append(Text(gap + text))
            elif self._layout.show_reasoning:
                deltas.append(Reasoning(gap + text))
        self._given.add(kind)
        self._begun = True

    def _close(self, deltas: list[Delta]) -> None:
        """The message has ended."""
        if self._kind is ToolArguments:
            if not self._begun:
                deltas.append(ToolArguments(self.calls, "{}"))
            self.calls += 1
            self.ended = self.calls == self._layout.max_calls


def reader_of(layout: Layout) -> Segments | Channels:
    """What reads an answer."""
    return Channels(layout) if layout.channels else Segments(layout)
