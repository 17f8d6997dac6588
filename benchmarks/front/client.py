"""A cheap client: connections in a closed loop with prepared requests; nothing is parsed but where answers end."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_LENGTH = re.compile(rb"content-length: (\d+)", re.I)
_LAST = b"0\r\n\r\n"


@dataclass
class Tally:
    """What came back. `firsts_s`: from each request until the first bytes of its answer's body."""

    ended: int = 0
    refused: int = 0
    bytes: int = 0
    firsts_s: list[float] = field(default_factory=list)


def post(body: dict[str, Any], key: str = "") -> bytes:
    """A whole request to /v1/completions."""
    data = json.dumps(body).encode()
    auth = f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: front\r\n{auth}Content-Length: {len(data)}\r\n"
    return (head + "Content-Type: application/json\r\n\r\n").encode() + data


class _Connection(asyncio.Protocol):
    def __init__(self, requests: Sequence[bytes], first: int, tally: Tally, stop: asyncio.Event) -> None:
        self._requests = itertools.cycle(requests[first % len(requests) :] + requests[: first % len(requests)])
        self._tally, self._stop = tally, stop
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        if self._stop.is_set():
            return self._transport.close()
        self._head, self._left, self._tail = b"", -1, b""
        self._asked = time.perf_counter()
        self._transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        self._tally.bytes += len(data)
        if self._left < 0 and not self._tail:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self._tally.refused += not head.startswith(b"HTTP/1.1 200")
            self._tally.firsts_s.append(time.perf_counter() - self._asked)
            length = _LENGTH.search(head)
            self._left = int(length[1]) if length else -1
            self._tail = b"-"
        if self._left >= 0:
            self._left -= len(data)
            ended = self._left <= 0
        else:
            self._tail = (self._tail + data)[-len(_LAST) :]
            ended = self._tail == _LAST
        if ended:
            self._tally.ended += 1
            self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def closed_loop(port: int, requests: Sequence[bytes], connections: int, seconds: float, tally: Tally) -> float:
    """Each connection asks again as soon as it is answered, for so long; the last answers are waited for. Returns the
    seconds that it took. Raises OSError if the server takes no connection."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    began = time.perf_counter()
    made = [
        await loop.create_connection(lambda i=i: _Connection(requests, i, tally, stop), "127.0.0.1", port)  # type: ignore[misc]
        for i in range(connections)
    ]
    await asyncio.sleep(seconds)
    stop.set()
    await asyncio.gather(*(protocol.closed for _, protocol in made))
    return time.perf_counter() - began
