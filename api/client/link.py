"""One engine process and the socket to it, from spawn to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from api.client.process import end, spawn
from engine import messages as m
from engine.heartbeat import Heartbeat

log = logging.getLogger("ktserve")
_LAST_WORDS_S = 0.1
_POLL_S = 0.001
_FRAMES_AT_ONCE = 16  # then others have their turn in the event loop


class EngineLink:
    """`heartbeat` is written by the process and says how long it has been silent.

    The socket is read where its descriptor says so, without zmq's own futures: they cost several times what a message
    does. The descriptor tells of news once, to a send as well as to a receive; after either, all must be taken.
    """

    def __init__(self, process: asyncio.subprocess.Process, socket: zmq.Socket[bytes], heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat
        self._process = process
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._broken: asyncio.Future[None] = self._loop.create_future()  # set to what was wrong with a frame
        self._dispatch: Callable[[m.FromEngine], None] | None = None  # while `run` runs
        self._num_frames = 0
        self._due = False  # `_read` will run soon

    @classmethod
    async def open(
        cls, context: zmq.Context[zmq.Socket[bytes]], command: Sequence[str], address: str, beats: Path
    ) -> EngineLink:
        """Spawn the engine, which binds `address` and beats in the file `beats`, and connect to it. Raises OSError."""
        heartbeat = Heartbeat.create(beats)
        process = await spawn([*command, "--address", address, "--heartbeat", str(beats)])
        socket = context.socket(zmq.DEALER)
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):  # bounded by open requests, not by dropping messages
            socket.setsockopt(option, 0)
        socket.connect(address)
        return cls(process, socket, heartbeat)

    def send(self, message: m.ToEngine) -> None:
        self._socket.send(m.encode(message), zmq.NOBLOCK)  # goes at once: there is no high-water mark
        self._read_soon()

    def kill(self) -> None:
        """End the process at once, stopped or not; `run` then returns."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def run(self, dispatch: Callable[[m.FromEngine], None]) -> str:
        """Hand every message to `dispatch` until the process has ended; returns how it ended. Cancelled, or if the
        engine sends what cannot be read, it is killed."""
        self._dispatch = dispatch
        descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(descriptor, self._read)
        self._read()
        ended = asyncio.create_task(self._process.wait())
        awaited: list[asyncio.Future[Any]] = [self._broken, ended]
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            await self._last_words()
            if self._broken.done():
                log.error("the engine sent what cannot be read: %s", self._broken.exception())
        finally:
            self._dispatch = None
            self._loop.remove_reader(descriptor)
            ended.cancel()
            self.kill()
            await end(self._process, 5)
            self._socket.close(linger=0)
        code = self._process.returncode
        return f"signal {-code}" if code is not None and code < 0 else f"status {code}"

    async def _last_words(self) -> None:
        """Until nothing has come for a while: an engine that ended may have said why."""
        heard, since = self._num_frames, self._loop.time()
        while not self._broken.done() and self._loop.time() - since < _LAST_WORDS_S:
            await asyncio.sleep(_POLL_S)
            self._read()
            if self._num_frames > heard:
                heard, since = self._num_frames, self._loop.time()

    def _read(self) -> None:
        """Dispatch what has arrived: some of it now, what is left soon."""
        self._due = False
        for _ in range(_FRAMES_AT_ONCE):
            if self._dispatch is None or self._broken.done():
                return
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._num_frames += 1
            try:
                for message in m.decode_from_engine(frame):
                    self._dispatch(message)
            except Exception as error:  # noqa: BLE001 - `run` reports it and ends the engine
                self._broken.set_exception(error)
        self._read_soon()

    def _read_soon(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._read)
