"""A server that runs as the partner of `ktserve chat --url`: OpenAI's chat completions, streamed."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from api.cli.conversation import Message
from engine.errors import EngineError, KtserveError, UserError

_CONNECT_S = 30.0
_Event = str | KtserveError | None  # a piece of text, what went wrong, the end


class ServerAnswerer:
    """`connect` makes one. Each request has a connection and a thread of its own."""

    def __init__(self, url: SplitResult, key: str | None) -> None:
        self._url, self._key = url, key
        self._base, self.adapters = "", list[str]()

    @classmethod
    async def connect(cls, url: str, key_file: str | None) -> ServerAnswerer:
        """UserError for a URL that is none, a server that cannot be reached, a key that it refuses."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"--url {url}: http://HOST:PORT is expected", "url")
        made = cls(parts, None if key_file is None else _key_of(key_file))
        models = (await asyncio.to_thread(made._models))["data"]
        made._base = next((model["id"] for model in models if not model.get("parent")), "")
        made.adapters = [model["id"] for model in models if model["id"] != made._base]
        return made

    async def answer(self, messages: list[Message], adapter: str | None) -> AsyncGenerator[str, None]:
        """UserError for what the server refuses, EngineError where it breaks off."""
        body = {"model": adapter or self._base, "messages": messages, "stream": True}
        connection, loop = self._connection(), asyncio.get_running_loop()
        events: asyncio.Queue[_Event] = asyncio.Queue()

        def put(event: _Event) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        threading.Thread(target=self._read, args=(connection, body, put), daemon=True, name="answer").start()
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, KtserveError):
                    raise event
                yield event
        finally:
            if (sock := connection.sock) is not None:
                _shut(sock)  # the thread's read ends, and the server ends the request

    def _read(self, connection: http.client.HTTPConnection, body: dict[str, Any], put: Any) -> None:
        try:
            for piece in _pieces(self._request(connection, "POST", "/v1/chat/completions", body)):
                put(piece)
            put(None)
        except KtserveError as error:
            put(error)
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            put(EngineError(f"the answer broke off: {error or type(error).__name__}"))
        finally:
            connection.close()

    def _models(self) -> Any:
        connection = self._connection()
        try:
            return json.load(self._request(connection, "GET", "/v1/models", None))
        except (OSError, http.client.HTTPException, ValueError) as error:
            where = self._url.geturl()
            raise UserError(f"--url {where}: {error}; is a server there? start one: ktserve serve", "url") from None
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        return kind(str(self._url.hostname), self._url.port, timeout=_CONNECT_S)

    def _request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        headers |= {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        connection.connect()
        connection.sock.settimeout(None)  # a first token may take minutes
        at = self._url.path.rstrip("/").removesuffix("/v1")
        connection.request(method, at + path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise UserError(f"the server answered {response.status}: {_reason(response.read())}", "url")
        return response


def _pieces(response: http.client.HTTPResponse) -> Any:
    """The text of a stream of events, without reasoning."""
    for line in response:
        data = line.strip().removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise EngineError(str(event["error"].get("message", event["error"])))
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""


def _reason(body: bytes) -> str:
    """What an error's body says; of a key that is missing, also how to give one."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = body[:200].decode(errors="replace") or "no reason"
    return message + ("; --key-file FILE names a file with yours" if "key" in message else "")


def _key_of(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--key-file {path}: {error}", "key_file") from None


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has ended by itself
        return
