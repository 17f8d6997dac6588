"""One engine process and the socket to it, from spawn to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
import zmq.asyncio

from api.client.process import end, spawn
from engine import messages as m
from engine.heartbeat import Heartbeat

log = logging.getLogger("ktserve")
_LAST_WORDS_MS = 100


class EngineLink:
    """`heartbeat` is written by the process and says how long it has been silent."""

    def __init__(self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat
        self._process = process
        self._socket = socket

    @classmethod
    async def open(cls, context: zmq.asyncio.Context, command: Sequence[str], address: str, beats: Path) -> EngineLink:
        """Spawn the engine, which binds `address` and beats in the file `beats`, and connect to it. Raises OSError."""
        heartbeat = Heartbeat.create(beats)
        process = await spawn([*command, "--address", address, "--heartbeat", str(beats)])
        socket = context.socket(zmq.DEALER)
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):  # bounded by open requests, not by dropping messages
            socket.setsockopt(option, 0)
        socket.connect(address)
        return cls(process, socket, heartbeat)

    def send(self, message: m.ToEngine) -> None:
        self._socket.send(m.encode(message))  # goes at once: there is no high-water mark

    def kill(self) -> None:
        """End the process at once, stopped or not; `run` then returns."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

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
                    await asyncio.sleep(0.001)  # the reader takes them; a second recv here could block indefinitely
                if reader.done():
                    log.error("the engine sent what cannot be read: %s", reader.exception())
        finally:
            reader.cancel()
            ended.cancel()
            self.kill()
            await end(self._process, 5)
            self._socket.close(linger=0)
        code = self._process.returncode
        return f"signal {-code}" if code is not None and code < 0 else f"status {code}"

    async def _read(self, dispatch: Callable[[m.FromEngine], None]) -> None:
        while True:
            dispatch(m.decode_from_engine(await self._socket.recv()))
