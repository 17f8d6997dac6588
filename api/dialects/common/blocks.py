"""An answer's deltas as blocks: runs of reasoning and of text, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

from api.text.deltas import Delta, Reasoning, Text, ToolArguments, ToolStart


class BlockKind(Enum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


class Change(Enum):
    START = "start"
    MORE = "more"
    STOP = "stop"


@dataclass
class Block:
    """`text`: of a call, its arguments' JSON. `scores`: log-probabilities of a text's tokens."""

    index: int
    kind: BlockKind
    text: str = ""
    call_id: str = ""
    name: str = ""
    scores: list[dict[str, Any]] = field(default_factory=list)

    @property
    def arguments(self) -> Any:
        """A call's arguments as an object; a text that is no JSON (a call cut off) stands as it is."""
        try:
            return msgspec.json.decode(self.text or "{}")
        except msgspec.DecodeError:
            return {"_unfinished": self.text}


class Blocks:
    """The blocks of one answer, as its deltas come."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open = False

    def push(self, deltas: Iterable[Delta]) -> Iterator[tuple[Change, Block, str]]:
        """(what happens, to which block, the text that is added)."""
        for delta in deltas:
            match delta:
                case ToolStart():
                    yield from self._begin(Block(len(self.all), BlockKind.CALL, "", delta.id, delta.name))
                case ToolArguments():
                    yield from self._add(delta.text)
                case Text() | Reasoning():
                    kind = BlockKind.TEXT if isinstance(delta, Text) else BlockKind.REASONING
                    if not self._open or self.all[-1].kind is not kind:
                        yield from self._begin(Block(len(self.all), kind))
                    yield from self._add(delta.text)

    def finish(self) -> Iterator[tuple[Change, Block, str]]:
        if self._open:
            self._open = False
            yield Change.STOP, self.all[-1], ""

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.all if block.kind is BlockKind.CALL]

    def _begin(self, block: Block) -> Iterator[tuple[Change, Block, str]]:
        yield from self.finish()
        self.all.append(block)
        self._open = True
        yield Change.START, block, ""

    def _add(self, text: str) -> Iterator[tuple[Change, Block, str]]:
        if text:
            self.all[-1].text += text
            yield Change.MORE, self.all[-1], text


def blocks_of(deltas: Iterable[Delta]) -> Blocks:
    """Of a whole answer."""
    blocks = Blocks()
    for _ in blocks.push(deltas):
        pass
    return blocks
