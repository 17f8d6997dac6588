"""The HTTP client of programs that measure or attack a server, over asyncio.

A read is kept with the time at which it came and is parsed when the answer has ended: the client shares the machine
with what it measures. `ktserve/openai_client.py` is the other client: locust's users are greenlets, whose sockets must
block, and it stops at a piece of text of an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

_HEAD_END = b"\r\n\r\n"
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})[ \r]")
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.I)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:\s*chunked", re.I)

Read = tuple[float, bytes]  # when it came, by time.perf_counter


class HttpError(Exception):
    """The answer is not HTTP, or not one that was asked for."""


@dataclass
class Answer:
    """`asked_s`, `ended_s`: by time.perf_counter. `whole`: it ended as its head had said. `status` 0: no head came."""

    asked_s: float
    ended_s: float = 0.0
    status: int = 0
    whole: bool = False
    _reads: list[Read] = field(default_factory=list)  # of the body, behind the head
    _head: bytes | None = b""  # what has come of it; None: all
    _left: int = -1  # of a body with a length
    _chunked: bool = False

    def take(self, data: bytes) -> bool:
        """What came now; whether it ends the answer. Raises HttpError."""
        now = time.perf_counter()
        if self._head is not None:
            head, found, data = (self._head + data).partition(_HEAD_END)
            if not found:
                self._head = head
                return False
            if not (status := _STATUS.match(head + b"\r")):
                raise HttpError(f"no HTTP answer: {head[:80]!r}")
            self._head, self.status = None, int(status[1])
            length = _LENGTH.search(head)
            self._left, self._chunked = int(length[1]) if length else -1, bool(_CHUNKED.search(head))
        self._reads.append((now, data))
        if self._chunked:
            # A chunk may end with these bytes too, and they may come in two reads.
            may_be_last = data.endswith(_HEAD_END) or len(data) < len(_HEAD_END)
            self.whole = may_be_last and any(not part for _, part in _chunks(self._reads))
        elif self._left >= 0:
            self._left -= len(data)
            self.whole = self._left <= 0
        return self.whole

    def close(self) -> None:
        """The server has closed the connection."""
        if self._head is None and not self.whole:
            self.whole = self._left < 0 and (not self._chunked or any(not part for _, part in _chunks(self._reads)))

    @property
    def reads(self) -> int:
        """How many have come of its body."""
        return len(self._reads)

    @property
    def first_s(self) -> float:
        """When the end of its head came."""
        return self._reads[0][0]

    @property
    def body(self) -> bytes:
        return b"".join(part for _, part in self._parts())

    @property
    def outcome(self) -> str:
        """The status, and whether the answer was cut, or a stream had an error."""
        streamed_error = self._chunked and b'\ndata: {"error"' in b"\n" + self.body
        return f"{self.status}" + (" error" if streamed_error else "" if self.whole else " cut")

    @property
    def refusal(self) -> str:
        if not self.status:
            return "the connection was closed before an answer came"
        return f"{self.status}: {self.body[:300].decode(errors='replace')}" + ("" if self.whole else " (cut)")

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> Iterator[tuple[float, str]]:
        """Of server-sent events: when the data of each came, wherever reads and chunks are cut."""
        rest = b""
        for when, part in self._parts():
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield when, line[5:].strip().decode()

    def _parts(self) -> Iterator[Read]:
        return _chunks(self._reads) if self._chunked else iter(self._reads)


def _chunks(reads: Sequence[Read]) -> Iterator[Read]:
    """What is in the chunks so far, and nothing (b"") where the last one has come. Raises HttpError."""
    rest, left = b"", 0  # of a chunk, with the line's end behind it
    for when, data in reads:
        data = rest + data
        while True:
            if left > 2:
                part, data = data[: left - 2], data[left - 2 :]
                left -= len(part)
                if part:
                    yield when, part
            if len(data) < left:
                break
            line, found, behind = data[left:].partition(b"\r\n")
            if not found:
                break
            try:
                size = int(line.partition(b";")[0], 16)
            except ValueError:
                raise HttpError(f"no length of a chunk: {line[:80]!r}") from None
            if size == 0:
                if behind.startswith(b"\r\n") or b"\r\n\r\n" in behind:  # no trailers, or all of them
                    yield when, b""
                    return
                break
            data, left = behind, size + 2
        rest = data


class Connection(asyncio.Protocol):
    """One request after another, whole or by hand; `Server.connection` opens one."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._answer = Answer(time.perf_counter())
        self._ended: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._read = asyncio.Event()

    async def ask(self, request: bytes) -> Answer:
        """The answer to a whole request, cut or not. Raises HttpError."""
        self._answer = Answer(time.perf_counter())
        self.transport.write(request)
        return await self.answer()

    async def answer(self) -> Answer:
        """What has come when it has ended, however that is. Raises HttpError."""
        if not self._over:
            self._ended = asyncio.get_running_loop().create_future()
            await self._ended
        if isinstance(self._error, HttpError):
            raise self._error
        return self._answer

    async def reads(self, count: int) -> None:
        """Wait for so many reads of an answer's body, or its end."""
        while self._answer.reads < count and not self._over:
            self._read.clear()
            await self._read.wait()

    @property
    def _over(self) -> bool:
        return self._answer.whole or self._error is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._read.set()
        try:
            if not self._answer.take(data):
                return
        except HttpError as error:
            self._error = error
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._error = self._error or exc or ConnectionResetError("the server closed the connection")
        try:
            self._answer.close()
        except HttpError as error:
            self._error = error
        self._read.set()
        self._end()

    def _end(self) -> None:
        if not self._answer.ended_s:
            self._answer.ended_s = time.perf_counter()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


@dataclass(frozen=True)
class Server:
    """`url` with or without /v1; `key` is sent, if there is one. Methods raise OSError if there is no connection."""

    url: str
    key: str = ""

    def head(
        self, method: str, path: str, length: int | None = None, kind: str = "application/json", again: bool = False
    ) -> bytes:
        """Of a request with so long a body of that content type. `again`: the connection stays for the next one."""
        parts = urlsplit(self.url)
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        lines = [f"{method} {prefix}{path} HTTP/1.1", f"Host: {parts.netloc}"]
        lines += [] if again else ["Connection: close"]
        lines += [f"Authorization: Bearer {self.key}"] if self.key else []
        lines += [] if length is None else [f"Content-Type: {kind}", f"Content-Length: {length}"]
        return "\r\n".join([*lines, "", ""]).encode()

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        parts = urlsplit(self.url)
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if secure else 80)
        loop = asyncio.get_running_loop()
        transport, connection = await loop.create_connection(Connection, parts.hostname or "", port, ssl=secure)
        try:
            yield connection
        finally:
            if transport.get_write_buffer_size():  # an answer that came before all was sent
                transport.abort()
            transport.close()

    async def exchange(
        self, method: str, path: str, body: bytes | None = None, kind: str = "application/json"
    ) -> Answer:
        """One request on a connection of its own. Raises HttpError."""
        asked_s = time.perf_counter()
        async with self.connection() as connection:
            head = self.head(method, path, None if body is None else len(body), kind)
            answer = await connection.ask(head + (body or b""))
            answer.asked_s = asked_s
            return answer

    async def get(self, path: str) -> Answer:
        return await self.exchange("GET", path)

    async def post(self, path: str, body: Any) -> Answer:
        return await self.exchange("POST", path, json.dumps(body).encode())
