"""The link's last moments: whatever an engine said before it ended is taken, by one reader, and the end is seen."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from api.client.link import EngineLink
from engine import messages as m

WORDS = [m.Loading(stage="layers", done=i, total=9) for i in range(9)]


class Ended:
    """A process that ends as soon as someone waits for it; what it had sent arrives at that very moment."""

    returncode = 3

    def __init__(self, engine: zmq.Socket[bytes], frames: list[bytes]) -> None:
        self._engine, self._frames = engine, frames

    async def wait(self) -> int:
        await asyncio.sleep(0)
        for frame in self._frames:
            self._engine.send(frame)
        self._frames = []
        return self.returncode

    def kill(self) -> None:
        raise ProcessLookupError


@contextmanager
def linked(frames: list[bytes]) -> Iterator[tuple[EngineLink, zmq.Socket[bytes]]]:
    """A link, and the engine's side of it."""
    context = zmq.Context()
    engine, api = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    engine.bind("inproc://engine")
    api.connect("inproc://engine")
    yield EngineLink(cast(Any, Ended(engine, frames)), api, cast(Any, None)), engine
    assert api.closed
    context.destroy(linger=0)


MANY = [m.encode(m.MessageBatch(messages=list(WORDS))), *map(m.encode, WORDS * 9)]


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([], []),
        ([m.encode(word) for word in WORDS], WORDS),
        (MANY, WORDS * 10),
        ([m.encode(WORDS[0]), b"\xc1", m.encode(WORDS[1])], WORDS[:1]),
    ],
)
def test_an_engine_that_is_dead_already_is_heard_out(frames: list[bytes], expected: list[m.FromEngine]) -> None:
    async def test() -> None:
        heard: list[m.FromEngine] = []
        with linked(frames) as (link, _):
            assert await asyncio.wait_for(link.run(heard.append), 10) == "status 3"
        assert heard == expected

    asyncio.run(test())


def test_what_arrives_while_messages_are_sent_is_heard() -> None:
    """A send may take the descriptor's news of what has arrived."""

    async def test() -> None:
        heard: list[m.FromEngine] = []
        with linked([]) as (link, engine):
            link._process.wait = asyncio.Event().wait  # type: ignore[attr-defined,method-assign]  # it lives
            running = asyncio.create_task(link.run(heard.append))
            await asyncio.sleep(0)
            for i in range(300):
                engine.send(m.encode(WORDS[i % 9]))
                link.send(m.GetStats(call_id=i))
                if i % 3:
                    await asyncio.sleep(0)
            while len(heard) < 300:  # the test's time-out ends it
                await asyncio.sleep(0.001)
            assert [m.decode_to_engine(engine.recv()).call_id for _ in range(300)] == list(range(300))  # type: ignore[union-attr]
            running.cancel()
            await asyncio.wait({running})

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
        context, heard = zmq.Context(), list[m.FromEngine]()
        address = f"ipc://{tmp_path}/engine"
        command = [sys.executable, "-c", _ENGINE, *(m.encode(word).hex() for word in WORDS)]
        link = await EngineLink.open(context, command, address, tmp_path / "beat")
        assert await asyncio.wait_for(link.run(heard.append), 60) == "status 7"
        assert heard == WORDS
        context.term()

    asyncio.run(test())
