"""What an answer consists of, as it comes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    """A call of a tool begins, number `index` of the answer; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """More of the JSON text of the arguments of call number `index`."""

    index: int
    text: str


Delta = Text | Reasoning | ToolStart | ToolArguments


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """The same, with neighbours of one kind as one and without empty texts."""
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


@dataclass(frozen=True, slots=True)
class Call:
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
