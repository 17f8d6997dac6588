"""One streamed completion over a connection of its own, timed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_LINE_LIMIT = 1 << 22


class BenchError(Exception):
    """The server said no, or not what the protocol says."""


@dataclass
class Result:
    """Seconds; `gaps_s` are between events that bring text. `error`: "" or why it failed."""

    asked_s: float
    ttft_s: float = 0.0
    total_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def tpot_s(self) -> float:
        """Per token after the first."""
        return (self.total_s - self.ttft_s) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass(frozen=True)
class Server:
    """`url` with or without /v1."""

    url: str
    key: str = ""
    timeout_s: float = 600.0

    async def get(self, path: str) -> bytes:
        """Raises BenchError or OSError."""
        async with self._exchange("GET", path, None) as (status, body):
            data = b"".join([part async for part in body])
        if status != 200:
            raise BenchError(f"GET {path}: {status}: {data[:300].decode(errors='replace')}")
        return data

    async def count(self, body: dict[str, Any]) -> int | None:
        """Tokens of a request's prompt or messages, by /tokenize; None where the server has none such."""
        asked: dict[str, Any] = {name: body[name] for name in ("model", "prompt", "messages") if name in body}
        try:
            async with self._exchange("POST", "/tokenize", asked) as (status, parts):
                data = b"".join([part async for part in parts])
            count = json.loads(data)["count"] if status == 200 else None
        except (OSError, BenchError, ValueError, KeyError, TypeError, asyncio.IncompleteReadError):
            return None
        return count if isinstance(count, int) else None

    async def stream(self, path: str, body: dict[str, Any]) -> Result:
        """Never raises for what the server does; the result has the error."""
        result, began = Result(time.perf_counter()), time.perf_counter()
        try:
            await asyncio.wait_for(self._read(path, body, result), self.timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            result.error = f"no end after {self.timeout_s:g} s"
        except (OSError, BenchError, ValueError, asyncio.IncompleteReadError) as error:
            result.error = f"{type(error).__name__}: {error}"
        result.total_s = time.perf_counter() - began
        return result

    async def _read(self, path: str, body: dict[str, Any], result: Result) -> None:
        last, pieces, ended = result.asked_s, 0, False
        async with self._exchange("POST", path, body) as (status, parts):
            if status != 200:
                said = b"".join([part async for part in parts])
                raise BenchError(f"{status}: {said[:300].decode(errors='replace')}")
            async for data in _events(parts):
                if data == "[DONE]":
                    ended = True
                    break
                event = json.loads(data)
                if "error" in event:
                    raise BenchError(str(event["error"]))
                usage = event.get("usage") or {}
                result.tokens = usage.get("completion_tokens", result.tokens)
                result.prompt_tokens = usage.get("prompt_tokens", result.prompt_tokens)
                if not (text := "".join(_text(choice) for choice in event.get("choices", ()))):
                    continue
                result.text += text
                now = time.perf_counter()
                if pieces:
                    result.gaps_s.append(now - last)
                else:
                    result.ttft_s = now - last
                pieces, last = pieces + 1, now
        if not ended:
            raise BenchError("the stream ended without [DONE]")
        if not pieces:
            raise BenchError("no text came")
        result.tokens = result.tokens or pieces  # of a server that does not tell

    @contextlib.asynccontextmanager
    async def _exchange(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        parts = urlsplit(self.url)
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if secure else 80)
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure, limit=_LINE_LIMIT)
        try:
            data = b"" if body is None else json.dumps(body).encode()
            prefix = parts.path.rstrip("/").removesuffix("/v1")
            lines = [f"{method} {prefix}{path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
            lines += [f"Authorization: Bearer {self.key}"] if self.key else []
            lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"] if body is not None else []
            writer.write("\r\n".join([*lines, "", ""]).encode() + data)
            await writer.drain()
            first = (await reader.readline()).split()
            if len(first) < 2 or not first[1].isdigit():
                raise BenchError("no HTTP answer")
            chunked = False
            while (line := await reader.readline()) not in (b"\r\n", b""):
                chunked |= line.lower().startswith(b"transfer-encoding:") and b"chunked" in line.lower()
            yield int(first[1]), _body(reader, chunked)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _body(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    if not chunked:
        while data := await reader.read(65536):
            yield data
        return
    while size := int((await reader.readline()).split(b";")[0].strip() or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of each server-sent event, wherever the parts are cut."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return str(choice.get("text") or delta.get("content") or delta.get("reasoning_content") or "")
