"""ktserve chat: a conversation in the terminal, with an engine as a child process and no HTTP, or with a server."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from api.bodies.generation import ChatOptions
from api.bodies.sampling import sampling_params
from api.cli.conversation import Message, Talk, converse
from api.cli.early import make_client, with_demo
from api.cli.keyboard import Keyboard
from api.cli.launch import sampling_defaults, start_engine, text_settings
from api.cli.say import say
from api.cli.server_chat import ServerAnswerer
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
from engine.errors import UserError


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
        say(console, [*notes, *lines, *more])
        await start_engine(client, console)
        answerer = EngineAnswerer(client, tokenizer, defaults, config.trust_control_tokens, config.default_max_tokens)
        talk = Talk(answerer, system)
        if adapter is not None:
            talk.use(adapter)
        with Keyboard() as keyboard:
            await converse(talk, keyboard, console)
    finally:
        await client.shutdown()
    return 0


async def chat_with_server(
    url: str, key_file: str | None, console: Console, *, adapter: str | None, system: str | None
) -> int:
    """The same with a server that runs. UserError if it cannot be reached or refuses the key."""
    talk = Talk(await ServerAnswerer.connect(url, key_file), system)
    if adapter is not None:
        talk.use(adapter)
    with Keyboard() as keyboard:
        await converse(talk, keyboard, console)
    return 0


@dataclass
class EngineAnswerer:
    """An engine that this program has started."""

    client: EngineClient
    tokenizer: Tokenizer
    defaults: dict[str, Any]
    trust_control_tokens: bool = False
    max_tokens: int | None = None
    metrics: Metrics = field(default_factory=Metrics)

    @property
    def adapters(self) -> list[str]:
        return list(self.client.adapters)

    async def answer(self, messages: list[Message], adapter: str | None) -> AsyncGenerator[str, None]:
        """UserError if the conversation is too long."""
        answers = self._submit(messages, adapter)
        try:
            while not answers.done:
                for _, update in await answers.take():
                    yield update.text
        finally:
            answers.abort()

    def _submit(self, messages: list[Message], adapter: str | None) -> Answers:
        ready = self.client.ready
        if ready is None:
            raise self.client.unavailable()
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
            adapter=adapter,
        )
        output = Output(self.tokenizer.detokenizer(skip_special_tokens=True, shown=layout.markers), segments=segments)
        request = self.client.submit(message, answers.inbox)
        answers.add(Choice(request, output, Meter(self.metrics), prompt_tokens=len(prompt)))
        return answers
