"""Many connections in a closed loop, of whose answers only the ends are looked at."""

from __future__ import annotations

import asyncio
import itertools
import json
import selectors
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtests.http import Server

_TICK_S = 0.002
_SILENCE_S = 120.0  # of all connections: the server does not answer any more


@dataclass
class Tally:
    """What came back. `firsts_s`: from each request until the head of its answer, to about 2 ms."""

    ended: int = 0
    refused: int = 0
    firsts_s: list[float] = field(default_factory=list)


class _Ticking(selectors.EpollSelector):
    """Looks at its sockets every `_TICK_S` and takes all that has come: on a machine with few CPUs, a client that wakes
    for each write of the server would be a part of what is measured."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout != 0:
            time.sleep(_TICK_S)
        return super().select(timeout)


def post(server: Server, body: dict[str, Any]) -> bytes:
    """A whole request to /v1/completions."""
    data = json.dumps(body).encode()
    return server.head("POST", "/v1/completions", len(data), again=True) + data


def closed_loop(server: Server, requests: Sequence[bytes], connections: int, seconds: float, tally: Tally) -> float:
    """Each connection asks again as soon as it is answered, for so long; the last answers are waited for. Returns the
    seconds that it took. Raises OSError if the server takes no connection or closes one, TimeoutError if it is
    silent."""
    began = time.perf_counter()

    async def stream(number: int) -> None:
        async with server.connection() as connection:
            for request in itertools.islice(itertools.cycle(requests), number % len(requests), None):
                answer = await connection.ask(request)
                if not answer.whole:
                    raise ConnectionResetError("the server closed the connection")
                tally.ended += 1
                tally.refused += answer.status != 200
                tally.firsts_s.append(answer.first_s - answer.asked_s)
                if time.perf_counter() - began >= seconds:
                    return

    async def run() -> None:
        streams = {asyncio.ensure_future(stream(number)) for number in range(connections)}
        try:
            while streams:
                before = tally.ended
                done, streams = await asyncio.wait(streams, timeout=_SILENCE_S, return_when=asyncio.FIRST_EXCEPTION)
                for ended in done:
                    ended.result()
                if not done and tally.ended == before:
                    raise TimeoutError(f"no answer ended within {_SILENCE_S:g} s")
        finally:
            for left in streams:
                left.cancel()
            await asyncio.gather(*streams, return_exceptions=True)

    loop = asyncio.SelectorEventLoop(_Ticking())
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
    return time.perf_counter() - began
