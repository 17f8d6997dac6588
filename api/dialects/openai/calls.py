"""Calls in a chat's answer: of functions, of tools that take a text, and in their older form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from api.text.calls.free_text import TextReader, text_in_arguments
from api.text.deltas import Call, ToolArguments, ToolStart


class WrittenCalls:
    """`functions`: in their older form, which has one. `free`: the tools that take a text."""

    def __init__(self, *, functions: bool = False, free: Iterable[str] = ()) -> None:
        self.functions = functions
        self._free = frozenset(free)
        self._reading: dict[tuple[int, int], TextReader] = {}  # (choice, call) -> its text

    def whole(self, calls: Sequence[Call]) -> dict[str, Any]:
        """The fields of a message."""
        if not calls:
            return {}
        if self.functions:
            return {"function_call": {"name": calls[0].name, "arguments": calls[0].arguments}}
        return {"tool_calls": [self._call(call) for call in calls]}

    def _call(self, call: Call) -> dict[str, Any]:
        if call.name in self._free:
            custom = {"name": call.name, "input": text_in_arguments(call.arguments)}
            return {"id": call.id, "type": "custom", "custom": custom}
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def delta(self, choice: int, delta: ToolStart | ToolArguments) -> dict[str, Any]:
        """The same as a part of a stream."""
        match delta:
            case ToolStart(_, _, name) if self.functions:
                return {"function_call": {"name": name, "arguments": ""}}
            case ToolArguments(_, text) if self.functions:
                return {"function_call": {"arguments": text}}
            case ToolStart(index, call_id, name) if name in self._free:
                self._reading[choice, index] = TextReader()
                custom = {"name": name, "input": ""}
                return {"tool_calls": [{"index": index, "id": call_id, "type": "custom", "custom": custom}]}
            case ToolStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
            case ToolArguments(index, text) if (reader := self._reading.get((choice, index))) is not None:
                return {"tool_calls": [{"index": index, "custom": {"input": reader.push(text)}}]}
            case ToolArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
