"""A server that runs as the partner of `ktserve chat --url`: OpenAI's chat completions, streamed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from urllib.parse import urlsplit

from api.cli.conversation import Message
from engine.errors import EngineError, KtserveError, UserError
from ktserve.openai_client import AnswerError, Exchange, Server

_Event = str | KtserveError | None  # a piece of text, what went wrong, the end


class ServerAnswerer:
    """`connect` makes one. Each request has a connection and a thread of its own."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._base, self.adapters = "", list[str]()

    @classmethod
    async def connect(cls, url: str, key_file: str | None) -> ServerAnswerer:
        """UserError for a URL that is none, a server that cannot be reached, a key that it refuses."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"--url {url}: write http://HOST:PORT", "url")
        made = cls(Server(url, "" if key_file is None else _key_of(key_file), None))  # a first token may take minutes
        try:
            models = await asyncio.to_thread(made._server.models)
        except (OSError, AnswerError) as error:
            if isinstance(error, AnswerError) and error.status:
                raise _refused(error) from None
            raise UserError(f"--url {url}: {error}; is a server there? start one: ktserve serve", "url") from None
        made._base = next((model["id"] for model in models if not model.get("parent")), "")
        made.adapters = [model["id"] for model in models if model["id"] != made._base]
        return made

    async def answer(self, messages: list[Message], adapter: str | None) -> AsyncGenerator[str, None]:
        """UserError for what the server refuses, EngineError where it breaks off."""
        body = {"model": adapter or self._base, "messages": messages, "stream": True}
        exchange, loop = self._server.stream("/v1/chat/completions", body), asyncio.get_running_loop()
        events: asyncio.Queue[_Event] = asyncio.Queue()

        def put(event: _Event) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        threading.Thread(target=_read, args=(exchange, put), daemon=True, name="answer").start()
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, KtserveError):
                    raise event
                yield event
        finally:
            exchange.hang_up()  # the thread's read ends, and the server ends the request


def _read(exchange: Exchange, put: Callable[[_Event], None]) -> None:
    """The text of a stream of events, without reasoning."""
    try:
        for event in exchange.events():
            for choice in event["choices"]:
                put(choice["delta"].get("content") or "")
        put(None)
    except (OSError, AnswerError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, AnswerError) and error.status:
            put(_refused(error))
        else:
            put(EngineError(f"the answer broke off: {error or type(error).__name__}"))


def _refused(error: AnswerError) -> UserError:
    """With how to give a key, where one is missing."""
    hint = "; --key-file FILE names a file with yours" if "key" in error.reason else ""
    return UserError(f"the server answered {error.status}: {error.reason}{hint}", "url")


def _key_of(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--key-file {path}: {error}", "key_file") from None
