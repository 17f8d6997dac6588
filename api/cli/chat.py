"""ktserve chat: a conversation in the terminal, engine as a child process, no HTTP."""

from __future__ import annotations

import asyncio
import signal
import uuid
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from api.bodies.generation import ChatOptions
from api.bodies.sampling import sampling_params
from api.cli.keyboard import Keyboard
from api.cli.launch import make_client, sampling_defaults, start_engine, text_settings, with_demo
from api.client.client import EngineClient
from api.client.stream import Inbox
from api.config import ServeConfig
from api.http.answers.generation import Answers, Choice
from api.http.answers.meter import Meter
from api.http.metrics import Metrics
from api.prepare.prompts import tokenizer_of
from api.text.calls.style import CallStyle
from api.text.channels import reader_of
from api.text.output import Output
from api.text.segments import Layout
from api.text.tokenizer import Tokenizer
from engine import messages as m
from engine.config import EngineConfig
from engine.errors import KtserveError, UserError

_HELP = """\
/adapter NAME   answer with an adapter (/adapter alone: the base model)
/adapters       what there is
/reset          forget the conversation
/quit           leave (also Ctrl-D)
Ctrl-C stops an answer."""


async def chat(
    engine: EngineConfig,
    config: ServeConfig,
    notes: list[str],
    console: Console,
    *,
    adapter: str | None,
    system: str | None,
) -> int:
    """Talk until /quit or the end of stdin. Raises UserError or EngineError if it cannot start."""
    engine, lines = with_demo(engine)
    tokenizer = tokenizer_of(text_settings(engine, config))
    if tokenizer is None or tokenizer.template is None:
        raise UserError("chat needs a tokenizer and a chat template (--tokenizer, --chat-template)", "tokenizer")
    defaults, more = sampling_defaults(engine, config)
    client = make_client(engine, config)
    try:
        ready = await start_engine(client, console)
        talk = Talk(client, tokenizer, defaults, config.trust_control_tokens, config.default_max_tokens, system)
        for line in [*notes, *lines, *more, *ready.lines]:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if adapter is not None:
            talk.use(adapter)
        with Keyboard() as keyboard:
            await _loop(talk, keyboard, console)
    finally:
        await client.shutdown()
    return 0


@dataclass
class Talk:
    """A conversation. `adapter` None: the base model."""

    client: EngineClient
    tokenizer: Tokenizer
    defaults: dict[str, Any]
    trust_control_tokens: bool = False
    max_tokens: int | None = None
    system: str | None = None
    adapter: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)

    def use(self, name: str) -> None:
        """Raises UserError for an unknown adapter."""
        if name and name not in self.client.adapters:
            known = ", ".join(self.client.adapters) or "none"
            raise UserError(f"no adapter {name!r}; there is: {known}", "adapter")
        self.adapter = name or None

    def submit(self, text: str) -> Answers:
        """Send the conversation with `text` as the next message. Raises UserError if it is too long."""
        ready = self.client.ready
        if ready is None:
            raise self.client.unavailable()
        head = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*head, *self.messages, {"role": "user", "content": text}]
        template = self.tokenizer.template
        layout = Layout(channels=template is not None and CallStyle.of(template).form.channels)
        segments = reader_of(layout) if layout else None
        rendered = self.tokenizer.render(messages, trust_control_tokens=self.trust_control_tokens, variables={})
        prompt = self.tokenizer.encode_rendered(rendered)
        room = ready.max_model_len - len(prompt)
        if room < 1:
            raise UserError(f"the conversation fills the context of {ready.max_model_len} tokens; /reset to start over")
        limit = room if self.max_tokens is None else min(self.max_tokens, room)
        body = ChatOptions(model=ready.model_name)
        answers = Answers(Inbox(), 1)
        message = m.Submit(
            request_id=uuid.uuid4().hex,
            prompt=prompt,
            sampling=sampling_params(body, self.defaults, limit, 0),
            adapter=self.adapter,
        )
        output = Output(self.tokenizer.detokenizer(skip_special_tokens=True, shown=layout.markers), segments=segments)
        request = self.client.submit(message, answers.inbox)
        answers.add(Choice(request, output, Meter(self.metrics), prompt_tokens=len(prompt)))
        return answers


async def _loop(talk: Talk, keyboard: Keyboard, console: Console) -> None:
    if keyboard.interactive:
        adapters = ", ".join(talk.client.adapters) or "none"
        console.print(f"adapters: {adapters}. /help shows what else there is.", markup=False, highlight=False)
    while (line := await keyboard.line(f"{talk.adapter or 'base'}> ")) is not None:
        words = line.split()
        if not words:
            continue
        if words[0] in ("/quit", "/exit"):
            return
        try:
            if words[0].startswith("/"):
                _command(talk, words, console)
            else:
                await _answer(talk, line)
        except KtserveError as error:
            console.print(f"error: {error}", markup=False, highlight=False)


def _command(talk: Talk, words: list[str], console: Console) -> None:
    match words:
        case ["/help"]:
            text = _HELP
        case ["/reset"]:
            talk.messages.clear()
            text = "(a new conversation)"
        case ["/adapters"]:
            text = "\n".join(["base", *talk.client.adapters])
        case ["/adapter"]:
            talk.use("")
            text = "(the base model answers)"
        case ["/adapter", name]:
            talk.use(name)
            text = f"({name} answers)"
        case _:
            text = f"unknown command {words[0]}; /help shows all"
    console.print(text, markup=False, highlight=False)


async def _answer(talk: Talk, text: str) -> None:
    answers = talk.submit(text)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, answers.abort)
    said: list[str] = []
    try:
        while not answers.done:
            for _, update in await answers.take():
                said.append(update.text)
                print(update.text, end="", flush=True)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        answers.abort()
        print(flush=True)
    talk.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "".join(said)}]
