"""One engine process and the socket to it, from spawn to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

import zmq
import zmq.asyncio

from api.process import end, spawn
from engine import messages as m

log = logging.getLogger("ktserve")
HELLO_CALL_ID = 0
_LAST_WORDS_MS = 100


class EngineLink:
    """The DEALER's identity is b"api" and its first message is `GetStats(call_id=0)`, so that an engine with a ROUTER
    knows whom to tell about loading."""

    def __init__(self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket) -> None:
        self._process = process
        self._socket = socket

    @classmethod
    async def open(cls, context: zmq.asyncio.Context, command: Sequence[str], address: str) -> EngineLink:
        """Spawn the engine, which binds `address`, and connect to it. Raises OSError."""
        process = await spawn(command)
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, b"api")
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):  # bounded by open requests, not by dropping messages
            socket.setsockopt(option, 0)
        socket.connect(address)
        link = cls(process, socket)
        link.send(m.GetStats(call_id=HELLO_CALL_ID))
        return link

    def send(self, message: m.ToEngine) -> None:
        self._socket.send(m.encode(message))  # goes at once: there is no high-water mark

    async def run(self, dispatch: Callable[[m.FromEngine], None]) -> str:
        """Hand every message to `dispatch` until the process has ended; returns how it ended. Cancelled, or if the
        engine sends what cannot be read, it is killed."""
        reader = asyncio.create_task(self._read(dispatch))
        ended = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({reader, ended}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():  # it returns by failing only
                log.error("the engine sent what cannot be read: %s", reader.exception())
            else:
                while not reader.done() and await self._socket.poll(_LAST_WORDS_MS):
                    await asyncio.sleep(0.001)  # the reader takes them; a second recv here would wait for ever
                if reader.done():
                    log.error("the engine sent what cannot be read: %s", reader.exception())
        finally:
            reader.cancel()
            ended.cancel()
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await end(self._process, 5)
            self._socket.close(linger=0)
        code = self._process.returncode
        return f"signal {-code}" if code is not None and code < 0 else f"status {code}"

    async def _read(self, dispatch: Callable[[m.FromEngine], None]) -> None:
        while True:
            dispatch(m.decode_from_engine(await self._socket.recv()))
