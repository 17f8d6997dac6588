"""A conversation in the terminal: its commands, its messages, an answer that Ctrl-C stops. Who answers is given."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console

from api.cli.keyboard import Keyboard
from engine.errors import KtserveError, UserError

_HELP = '''\
/adapter NAME   answer with an adapter (/adapter alone: the base model)
/adapters       what there is
/system TEXT    set the system prompt (/system alone: none)
/regenerate     answer the last message again
/reset          forget the conversation
/quit           leave (also Ctrl-D)
A line that ends with \\ goes on in the next; """ begins and ends a message of several lines.
Ctrl-C stops an answer.'''
_QUOTES = '"""'

Message = dict[str, str]


class Answerer(Protocol):
    """The model, in this program or behind a URL."""

    @property
    def adapters(self) -> list[str]: ...

    def answer(self, messages: list[Message], adapter: str | None) -> AsyncGenerator[str, None]:
        """Pieces of text. Closing it early ends the request. KtserveError for what cannot be answered."""


@dataclass
class Talk:
    """`adapter` None: the base model."""

    answerer: Answerer
    system: str | None = None
    adapter: str | None = None
    messages: list[Message] = field(default_factory=list)

    def use(self, name: str) -> None:
        """Raises UserError for an unknown adapter."""
        if name and name not in self.answerer.adapters:
            known = ", ".join(self.answerer.adapters) or "none"
            raise UserError(f"no adapter {name!r}; there is: {known}", "adapter")
        self.adapter = name or None

    def take_back(self) -> str:
        """The last message of the user, which with its answer is forgotten. UserError if there is none."""
        if not self.messages:
            raise UserError("there is no message to answer again")
        text = self.messages[-2]["content"]
        del self.messages[-2:]
        return text


async def converse(talk: Talk, keyboard: Keyboard, console: Console) -> None:
    """Until /quit or the end of the input."""
    if keyboard.interactive:
        adapters = ", ".join(talk.answerer.adapters) or "none"
        console.print(f"adapters: {adapters}. /help shows what else there is.", markup=False, highlight=False)
    while (text := await _message(keyboard, f"{talk.adapter or 'base'}> ")) is not None:
        words = text.split()
        if not words:
            continue
        if words[0] in ("/quit", "/exit"):
            return
        try:
            if words == ["/regenerate"]:
                await _answer_again(talk)
            elif words[0].startswith("/"):
                _command(talk, text, console)
            else:
                await _answer(talk, text)
        except KtserveError as error:
            console.print(f"error: {error}", markup=False, highlight=False)


async def _answer_again(talk: Talk) -> None:
    """What there was stays if no answer comes."""
    kept = list(talk.messages)
    try:
        await _answer(talk, talk.take_back())
    except KtserveError:
        talk.messages[:] = kept
        raise


async def _message(keyboard: Keyboard, prompt: str) -> str | None:
    """A line, or the several of one message; None at the end of the input."""
    line = await keyboard.line(prompt)
    if line is None:
        return None
    lines: list[str] = []
    if line.lstrip().startswith(_QUOTES):
        more: str | None = line.lstrip().removeprefix(_QUOTES)
        while more is not None and not more.rstrip().endswith(_QUOTES):
            lines.append(more)
            more = await keyboard.line("... ")
        return "\n".join([*lines, *([] if more is None else [more.rstrip().removesuffix(_QUOTES)])]).strip("\n")
    while line is not None and line.endswith("\\"):
        lines.append(line[:-1])
        line = await keyboard.line("... ")
    return "\n".join([*lines, *([] if line is None else [line])])


def _command(talk: Talk, line: str, console: Console) -> None:
    match line.split():
        case ["/help"]:
            text = _HELP
        case ["/reset"]:
            talk.messages.clear()
            text = "(a new conversation)"
        case ["/adapters"]:
            text = "\n".join(["base", *talk.answerer.adapters])
        case ["/adapter"]:
            talk.use("")
            text = "(the base model answers)"
        case ["/adapter", name]:
            talk.use(name)
            text = f"({name} answers)"
        case ["/system"]:
            talk.system = None
            text = "(no system prompt)"
        case ["/system", *_]:
            talk.system = line.strip().removeprefix("/system").strip()
            text = "(the system prompt is set)"
        case words:
            text = f"unknown command {words[0]}; /help shows all"
    console.print(text, markup=False, highlight=False)


async def _answer(talk: Talk, text: str) -> None:
    head = [{"role": "system", "content": talk.system}] if talk.system else []
    asked = {"role": "user", "content": text}
    said: list[str] = []

    async def take() -> None:
        async with contextlib.aclosing(talk.answerer.answer([*head, *talk.messages, asked], talk.adapter)) as pieces:
            async for piece in pieces:
                said.append(piece)
                print(piece, end="", flush=True)

    loop = asyncio.get_running_loop()
    taking = asyncio.ensure_future(take())
    loop.add_signal_handler(signal.SIGINT, taking.cancel)
    try:
        await asyncio.wait({taking})
        if not taking.cancelled():
            taking.result()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        taking.cancel()
        print(flush=True)
    talk.messages += [asked, {"role": "assistant", "content": "".join(said)}]
