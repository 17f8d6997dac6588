"""What an answer consists of, as it comes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec


class Text(msgspec.Struct, frozen=True, gc=False):
    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    text: str


class ToolStart(msgspec.Struct, frozen=True, gc=False):
    """A call of a tool begins, number `index` of the answer; its arguments follow."""

    index: int
    id: str
    name: str


class ToolArguments(msgspec.Struct, frozen=True, gc=False):
    """More of the JSON text of the arguments of call number `index`."""

    index: int
    text: str


Delta = Text | Reasoning | ToolStart | ToolArguments


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """The same, with neighbours of one kind as one and without empty texts."""
    if len(deltas) == 1:  # as nearly always in a stream
        return [] if isinstance(deltas[0], Text | Reasoning) and not deltas[0].text else list(deltas)
    result: list[Delta] = []
    for (kind, index), run in groupby(deltas, lambda delta: (type(delta), getattr(delta, "index", 0))):
        if kind is ToolStart:
            result += run
            continue
        text = "".join(delta.text for delta in run if not isinstance(delta, ToolStart))
        if kind is ToolArguments:
            result.append(ToolArguments(index, text))
        elif text:
            result.append(Text(text) if kind is Text else Reasoning(text))
    return result


def text_of(deltas: Iterable[Delta]) -> str:
    """The answer itself, without reasoning and calls."""
    return "".join(delta.text for delta in deltas if isinstance(delta, Text))


def reasoning_of(deltas: Iterable[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))


class Call(msgspec.Struct, frozen=True, gc=False):
    """`arguments`: JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str


def calls_of(deltas: Iterable[Delta]) -> list[Call]:
    """The calls of a whole answer, in their order."""
    starts: list[ToolStart] = []
    arguments: list[str] = []
    for delta in deltas:
        if isinstance(delta, ToolStart):
            starts.append(delta)
            arguments.append("")
        elif isinstance(delta, ToolArguments):
            arguments[delta.index] += delta.text
    return [Call(start.id, start.name, text) for start, text in zip(starts, arguments, strict=True)]
