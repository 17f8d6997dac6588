"""The link's last moments: whatever an engine said before it ended is taken, by one reader, and the end is seen."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import zmq.asyncio

from api.client.link import EngineLink
from engine import messages as m

WORDS = [m.Loading(stage="layers", done=i, total=9) for i in range(9)]


class Ended:
    """A process that ends as soon as someone waits for it; what it had sent arrives at that very moment."""

    returncode = 3

    def __init__(self, socket: Socket, words: list[bytes]) -> None:
        self._socket, self._words = socket, words

    async def wait(self) -> int:
        await asyncio.sleep(0)
        self._socket.arrive(self._words)
        return self.returncode

    def kill(self) -> None:
        raise ProcessLookupError


class Socket:
    """As zmq's: a second `recv` beside a waiting one could block indefinitely, so here it is an error."""

    def __init__(self) -> None:
        self.reading = False
        self.closed = False
        self._waiting: list[bytes] = []
        self._arrived = asyncio.Event()

    def arrive(self, words: list[bytes]) -> None:
        self._waiting += words
        self._arrived.set()

    async def recv(self) -> bytes:
        assert not self.reading, "two readers of one socket"
        self.reading = True
        try:
            while not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            await asyncio.sleep(0)
            return self._waiting.pop(0)
        finally:
            self.reading = False

    async def poll(self, _timeout: int) -> int:
        await asyncio.sleep(0)
        return int(bool(self._waiting))

    def close(self, linger: int) -> None:
        assert linger == 0
        self.closed = True


@pytest.mark.parametrize("words", [[], [m.encode(word) for word in WORDS], [m.encode(WORDS[0]), b"\xc1", b"\xc1"]])
def test_an_engine_that_is_dead_already_is_heard_out(words: list[bytes]) -> None:
    async def test() -> None:
        socket, heard = Socket(), list[m.FromEngine]()
        link = EngineLink(cast(Any, Ended(socket, words)), cast(Any, socket), cast(Any, None))
        assert await asyncio.wait_for(link.run(heard.append), 10) == "status 3"
        assert heard == WORDS[: words.index(b"\xc1") if b"\xc1" in words else len(words)]
        assert socket.closed and not socket.reading

    asyncio.run(test())


_ENGINE = """
import sys, zmq
context = zmq.Context()
socket = context.socket(zmq.DEALER)
socket.bind(sys.argv[sys.argv.index("--address") + 1])
for word in sys.argv[1:sys.argv.index("--address")]:
    socket.send(bytes.fromhex(word))
socket.close()
context.term()
sys.exit(7)
"""


def test_a_real_engine_that_dies_at_its_start(tmp_path: Path) -> None:
    async def test() -> None:
        context, heard = zmq.asyncio.Context(), list[m.FromEngine]()
        address = f"ipc://{tmp_path}/engine"
        command = [sys.executable, "-c", _ENGINE, *(m.encode(word).hex() for word in WORDS)]
        link = await EngineLink.open(context, command, address, tmp_path / "beat")
        assert await asyncio.wait_for(link.run(heard.append), 60) == "status 7"
        assert heard == WORDS
        context.term()

    asyncio.run(test())
