"""The api's side: lanes to the preparing process, so that large bodies never delay small ones, nor batches anybody."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal

import msgspec

from api.client.process import SocketDir, end, spawn
from api.errors import ApiError
from api.prepare.job import LENGTH, Declined, Job, Prepared, TextSettings, decode_answer, encode
from engine.errors import EngineError
from ktserve.launcher import program

log = logging.getLogger("ktserve")
_SMALL = 64 * 2**10  # bytes of a body
_CHUNK = 2**18
_RETRY_S = 0.02
_WALL_FACTOR = 30  # a machine so busy that CPU time passes this slowly is not waited for


class PromptPool:
    """Owns the process. `start` before use, `close` at the end."""

    def __init__(self, settings: TextSettings) -> None:
        self._settings = settings
        self._dir = SocketDir()
        self._process: asyncio.subprocess.Process | None = None
        self._starts = 0
        self._starting = asyncio.Lock()
        self._small, self._large, self._background = _Lane(self), _Lane(self), _Lane(self)

    async def start(self) -> None:
        """Raises EngineError if the process cannot be started."""
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return
            if self._process is not None:
                log.error("the process that prepares prompts ended (%s); starting it again", self._process.returncode)
            self._starts += 1
            payload = msgspec.json.encode(self._settings).decode()
            try:
                self._process = await spawn(program("prompts", self._path, payload))
            except OSError as error:
                raise EngineError(f"cannot start the process that prepares prompts: {error.strerror}") from None

    @property
    def _path(self) -> str:
        return str(self._dir.path / f"prompts-{self._starts}")

    async def prepare(self, job: Job, raw: bytes, *, background: bool = False) -> Prepared:
        """Raises ApiError. Cancelled, it ends the work."""
        lane = self._background if background else self._small if len(raw) <= _SMALL else self._large
        return await lane.run(job, raw)

    async def close(self) -> None:
        for lane in (self._small, self._large, self._background):
            lane.drop()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await end(self._process, 5)
        self._dir.remove()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to a child of its own. Raises EngineError."""
        await self.start()
        process = self._process
        while process is not None and process.returncode is None:
            with contextlib.suppress(FileNotFoundError, ConnectionError):
                return await asyncio.open_unix_connection(self._path)
            await asyncio.sleep(_RETRY_S)  # it loads the tokenizer
        raise EngineError("the process that prepares prompts ended while it started")

    @property
    def settings(self) -> TextSettings:
        return self._settings


class _Lane:
    """One child; jobs one after another."""

    def __init__(self, pool: PromptPool) -> None:
        self._pool = pool
        self._lock = asyncio.Lock()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._pid = 0

    async def run(self, job: Job, raw: bytes) -> Prepared:
        limit_s = self._pool.settings.cpu_limit_s
        async with self._lock:
            if self._reader is None or self._writer is None or self._reader.at_eof() or self._writer.is_closing():
                await self._open()
            finished = False
            try:
                answer = await asyncio.wait_for(self._exchange(job, raw), limit_s * _WALL_FACTOR)
                finished = True
            except (asyncio.IncompleteReadError, ConnectionError, asyncio.TimeoutError):
                log.warning("preparing a %s request of %d bytes was cut off", job.kind.value, len(raw))
                raise ApiError(
                    400,
                    f"its text or its grammar takes more than {limit_s:g} s of CPU time to prepare, or too much memory",
                    param="messages" if job.kind.value == "chat" else "prompt",
                    code="prompt_too_expensive",
                ) from None
            finally:
                if not finished or len(raw) > _SMALL:  # what a large body leaves in memory goes with its child
                    self.drop()
        if isinstance(answer, Prepared):
            return answer
        raise ApiError(answer.status, answer.message, param=answer.param, code=answer.code)

    async def _open(self) -> None:
        self.drop()
        self._reader, self._writer = await self._pool.connect()
        try:
            (self._pid,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.drop()
            raise EngineError("the process that prepares prompts ended") from None

    async def _exchange(self, job: Job, raw: bytes) -> Prepared | Declined:
        assert self._reader is not None and self._writer is not None  # run opened them
        head = encode(job)
        self._write(LENGTH.pack(len(head)) + head + LENGTH.pack(len(raw)))
        view = memoryview(raw)
        for start in range(0, len(raw), _CHUNK):
            self._write(view[start : start + _CHUNK])
            await self._writer.drain()
        answer = decode_answer(await self._reader.readexactly(await self._length()))
        left, pieces = await self._length(), []
        while left:
            if not (piece := await self._reader.read(min(left, _CHUNK))):
                raise asyncio.IncompleteReadError(b"", left)
            pieces.append(piece)
            left -= len(piece)
        return msgspec.structs.replace(answer, answer=pieces) if isinstance(answer, Prepared) else answer

    def _write(self, data: bytes | memoryview) -> None:
        assert self._writer is not None  # run opened it
        if self._writer.is_closing():  # uvloop's writer would raise RuntimeError
            raise ConnectionResetError
        self._writer.write(data)

    async def _length(self) -> int:
        assert self._reader is not None  # run opened it
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return int(length)

    def drop(self) -> None:
        """Close the connection and end its child, whatever it is doing."""
        if self._writer is not None and self._reader is not None:
            self._writer.close()
            if self._pid and not self._reader.at_eof():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
        self._reader = self._writer = None
        self._pid = 0
