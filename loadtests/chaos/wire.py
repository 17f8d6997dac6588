"""HTTP by hand, so that it can be done wrong: one connection, one request, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

_LINE_LIMIT = 1 << 20


@dataclass(frozen=True)
class Target:
    """A server on this machine and a key for it."""

    host: str
    port: int
    key: str = ""

    def head(self, method: str, path: str, length: int | None = None, kind: str = "application/json") -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}", "Connection: close"]
        if self.key:
            lines.append(f"Authorization: Bearer {self.key}")
        if length is not None:
            lines += [f"Content-Type: {kind}", f"Content-Length: {length}"]
        return "\r\n".join([*lines, "", ""]).encode()


@dataclass
class Answer:
    """`end`: "complete"; "error" for an error inside a stream; "cut" if the connection closed before the end."""

    status: int
    body: bytes
    end: str

    @property
    def outcome(self) -> str:
        return f"{self.status}" if self.end == "complete" else f"{self.status} {self.end}"

    def json(self) -> Any:
        return json.loads(self.body)


@asynccontextmanager
async def connection(target: Target) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(target.host, target.port, limit=_LINE_LIMIT)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def exchange(
    target: Target, method: str, path: str, body: bytes | None = None, kind: str = "application/json"
) -> Answer:
    """One whole request, its body of that content type. Raises OSError if there is no connection to be had."""
    async with connection(target) as (reader, writer):
        with contextlib.suppress(ConnectionError):  # refused early: the answer is there to read
            writer.write(target.head(method, path, None if body is None else len(body), kind) + (body or b""))
            await writer.drain()
        return await read_answer(reader)


async def post(target: Target, path: str, body: Any) -> Answer:
    return await exchange(target, "POST", path, json.dumps(body).encode())


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    status, chunked, length = await _read_head(reader)
    if status == 0:
        return Answer(0, b"", "cut")
    body, whole = await (_read_chunks(reader) if chunked else _read_length(reader, length))
    if not whole:
        return Answer(status, body, "cut")
    streamed_error = chunked and b'\ndata: {"error"' in b"\n" + body
    return Answer(status, body, "error" if streamed_error else "complete")


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool, int | None]:
    """Status (0: closed before there was one), whether the body is chunked, its length if that is given."""
    status, chunked, length = 0, False, None
    try:
        first = await reader.readline()
        status = int(first.split()[1]) if first else 0
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            chunked |= name.lower() == "transfer-encoding" and "chunked" in value
            length = int(value) if name.lower() == "content-length" else length
    except (ConnectionError, IndexError, ValueError):
        return 0, False, None
    return status, chunked, length


async def _read_length(reader: asyncio.StreamReader, length: int | None) -> tuple[bytes, bool]:
    try:
        return (await reader.read(), True) if length is None else (await reader.readexactly(length), True)
    except (asyncio.IncompleteReadError, ConnectionError):
        return b"", False


async def _read_chunks(reader: asyncio.StreamReader) -> tuple[bytes, bool]:
    parts: list[bytes] = []
    try:
        while size := int((await reader.readline()).strip() or b"-1", 16):
            if size < 0:
                return b"".join(parts), False
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        return b"".join(parts), True
    except (asyncio.IncompleteReadError, ConnectionError, ValueError):
        return b"".join(parts), False


def reset_on_close(writer: asyncio.StreamWriter) -> None:
    """Closing then sends RST, as a client that was killed does."""
    import socket

    handle = writer.get_extra_info("socket")
    handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
