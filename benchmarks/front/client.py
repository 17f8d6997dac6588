"""A cheap client: connections in a closed loop with prepared requests; nothing is parsed but where answers end.

It looks at its sockets every `_TICK_S` and takes all that has come: on a machine with few CPUs, a client that wakes for
each write of the server would be a part of what is measured.
"""

from __future__ import annotations

import itertools
import json
import re
import select
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

_LENGTH = re.compile(rb"content-length: (\d+)", re.I)
_LAST = b"0\r\n\r\n"
_TICK_S = 0.002
_SILENCE_S = 120.0  # of all connections: the server does not answer any more
_MOST = 1 << 18


@dataclass
class Tally:
    """What came back. `firsts_s`: from each request until the first bytes of its answer's body, to about 2 ms."""

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


class _Connection:
    """One request after another; `requests` is endless."""

    def __init__(self, sock: socket.socket, requests: Iterator[bytes], tally: Tally) -> None:
        self._sock, self._requests, self._tally = sock, requests, tally
        sock.setblocking(False)
        self.ask()

    def ask(self) -> None:
        self._head, self._left, self._tail = b"", -1, b""
        self._asked = time.perf_counter()
        self._sock.send(next(self._requests))  # a socket that waits for answers alone takes it whole

    def take(self) -> bool:
        """What has come; whether the answer has ended. Raises ConnectionError."""
        data = self._sock.recv(_MOST)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        tally = self._tally
        tally.bytes += len(data)
        if self._left < 0 and not self._tail:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return False
            tally.refused += not head.startswith(b"HTTP/1.1 200")
            tally.firsts_s.append(time.perf_counter() - self._asked)
            length = _LENGTH.search(head)
            self._left = int(length[1]) if length else -1
            self._tail = b"-"
        if self._left >= 0:
            self._left -= len(data)
            ended = self._left <= 0
        else:
            self._tail = data[-5:] if len(data) >= 5 else (self._tail + data)[-5:]
            ended = self._tail == _LAST
        tally.ended += ended
        return ended


def closed_loop(port: int, requests: Sequence[bytes], connections: int, seconds: float, tally: Tally) -> float:
    """Each connection asks again as soon as it is answered, for so long; the last answers are waited for. Returns the
    seconds that it took. Raises OSError if the server takes no connection or closes one, TimeoutError if it is
    silent."""
    began = time.perf_counter()
    with ExitStack() as stack:
        poll = stack.enter_context(select.epoll())
        open_ones: dict[int, _Connection] = {}
        for i in range(connections):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            own = itertools.islice(itertools.cycle(requests), i % len(requests), None)
            open_ones[sock.fileno()] = _Connection(sock, own, tally)
            poll.register(sock, select.EPOLLIN)
        while open_ones:
            ready = poll.poll(_SILENCE_S)
            if not ready:
                raise TimeoutError(f"nothing came for {_SILENCE_S:g} s")
            for number, _ in ready:
                if open_ones[number].take():
                    if time.perf_counter() - began < seconds:
                        open_ones[number].ask()
                    else:
                        poll.unregister(number)
                        del open_ones[number]
            time.sleep(_TICK_S)
    return time.perf_counter() - began
