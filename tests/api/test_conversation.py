"""A chat in the terminal whose server fails."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator

import pytest
from rich.console import Console

from api.cli.conversation import Message, Talk, converse
from engine.errors import EngineError


class Failing:
    """Answers once."""

    def __init__(self) -> None:
        self.adapters: list[str] = []
        self._answered = False

    async def answer(self, messages: list[Message], adapter: str | None) -> AsyncGenerator[str, None]:
        if self._answered:
            raise EngineError("the engine has ended")
        self._answered = True
        yield "hello"


class Lines:
    interactive = False

    def __init__(self, *lines: str) -> None:
        self._lines = iter(lines)

    async def line(self, prompt: str) -> str | None:
        return next(self._lines, None)


@pytest.mark.parametrize("line", ["/regenerate", "again"])
def test_what_was_said_stays_if_no_answer_comes(line: str) -> None:
    talk = Talk(Failing())
    console = Console(file=(said := io.StringIO()))
    asyncio.run(converse(talk, Lines("hi", line), console))  # type: ignore[arg-type]
    assert "the engine has ended" in said.getvalue()
    assert [message["content"] for message in talk.messages] == ["hi", "hello"]
