"""The api's side: lanes to the preparing process, so that large bodies never delay small ones, nor batches anybody."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections import deque

import msgspec

from api.client.process import SocketDir, end, spawn
from api.errors import ApiError, TooLongError
from api.prepare.job import LENGTH, Declined, Job, Kind, Prepared, TextSettings, decode_answer, encode
from engine.errors import EngineError
from ktserve.launcher import program

log = logging.getLogger("ktserve")
_SMALL = 64 * 2**10  # bytes of a body
_CHUNK = 2**18
_RETRY_S = 0.02
_DEPTH = 64  # small jobs on their way to their child
_ABANDONED_S = 0.05  # a job that nobody waits for any more may take so long: most do, and a new child costs as much
_SHORT_BODIES = {
    Kind.COMPLETION: b'{"model": "", "prompt": [0]}',
    Kind.CHAT: b'{"model": "", "messages": [{"role": "user", "content": "Hello"}]}',
}
_ANY_SIZE = 2**31 - 1  # of a vocabulary, of a context
_WALL_FACTOR = 30  # a machine so busy that CPU time passes this slowly is not waited for


class PromptPool:
    """Owns the process. `start` before use, `close` at the end."""

    def __init__(self, settings: TextSettings) -> None:
        self._settings = settings
        self._dir = SocketDir()
        self._process: asyncio.subprocess.Process | None = None
        self._starts = 0
        self._starting = asyncio.Lock()
        self._small, self._large, self._background = _Lane(self, _DEPTH), _Lane(self), _Lane(self)

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

    async def warm(self) -> None:
        """Prepare what short requests look like, so that the first one does not wait for a child, nor for its memory.
        What goes wrong is said to whoever asks for it."""
        for kind, raw in _SHORT_BODIES.items():
            with contextlib.suppress(ApiError, EngineError):
                await self._small.run(Job(kind, _ANY_SIZE, _ANY_SIZE), raw)

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
    """One child, which takes jobs one after another. `depth` of them may be on their way to it, so that it need not
    wait for a turn of this process's event loop between two."""

    def __init__(self, pool: PromptPool, depth: int = 1) -> None:
        self._pool = pool
        self._places = asyncio.Semaphore(depth)
        self._opening = asyncio.Lock()
        self._child: _Child | None = None

    async def run(self, job: Job, raw: bytes) -> Prepared:
        async with self._places:
            answer = None
            while answer is None:
                child = await self._opened()
                try:
                    answer = await child.ask(job, raw)
                except _CutOffError:
                    log.warning("preparing a %s request of %d bytes was cut off", job.kind.value, len(raw))
                    raise ApiError(
                        400,
                        f"its text or its grammar takes more than {self._pool.settings.cpu_limit_s:g} s of CPU time to "
                        "prepare, or too much memory",
                        param="messages" if job.kind.value == "chat" else "prompt",
                        code="prompt_too_expensive",
                    ) from None
                finally:
                    if len(raw) > _SMALL:  # what a large body leaves in memory goes with its child
                        child.end()
        if isinstance(answer, Prepared):
            return answer
        if answer.too_long is not None:
            prompt_tokens, limit = answer.too_long
            raise TooLongError(answer.message, answer.param or "prompt", prompt_tokens, None, limit)
        raise ApiError(answer.status, answer.message, param=answer.param, code=answer.code)

    async def _opened(self) -> _Child:
        async with self._opening:
            if self._child is None or self._child.ended:
                self._child = await _Child.open(self._pool)
            return self._child

    def drop(self) -> None:
        if self._child is not None:
            self._child.end()


class _CutOffError(Exception):
    """The child ended while it worked on this job."""


class _Child:
    """A connection to a child of its own. Jobs are answered in the order in which they were sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int, limit_s: float) -> None:
        self.ended = False
        self._reader = reader
        self._writer = writer
        self._pid = pid
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._sent: deque[asyncio.Future[Prepared | Declined | None]] = deque()  # it works on the first
        self._began_s = 0.0  # the first
        self._timer: asyncio.TimerHandle | None = None
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, pool: PromptPool) -> _Child:
        """Raises EngineError."""
        reader, writer = await pool.connect()
        try:
            (pid,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        except BaseException as error:
            writer.close()
            if isinstance(error, asyncio.IncompleteReadError | ConnectionError):
                raise EngineError("the process that prepares prompts ended") from None
            raise
        return cls(reader, writer, pid, pool.settings.cpu_limit_s * _WALL_FACTOR)

    async def ask(self, job: Job, raw: bytes) -> Prepared | Declined | None:
        """None if the child ended because of another job. Raises _CutOffError if it was this one. Cancelled, it ends
        the work: if the child has begun, that ends."""
        answer: asyncio.Future[Prepared | Declined | None] = self._loop.create_future()
        self._sent.append(answer)
        if len(self._sent) == 1:
            self._begin()
        try:
            with contextlib.suppress(ConnectionError):  # `_read` has noticed too
                await self._write(job, raw)
            return await answer
        except asyncio.CancelledError:
            answer.cancel()
            self._watch()
            raise

    async def _write(self, job: Job, raw: bytes) -> None:
        head = encode(job)
        head = LENGTH.pack(len(head)) + head + LENGTH.pack(len(raw))
        if self._writer.is_closing():  # uvloop's writer would raise RuntimeError
            return
        if len(raw) <= _SMALL:
            self._writer.write(head + raw)  # at once: others may be sent meanwhile
            return
        self._writer.write(head)
        view = memoryview(raw)
        for start in range(0, len(raw), _CHUNK):
            if self._writer.is_closing():
                return
            self._writer.write(view[start : start + _CHUNK])
            await self._writer.drain()

    async def _read(self) -> None:
        """Answers, until the connection closes."""
        try:
            while True:
                answer = await self._answer()
                sent = self._sent.popleft()
                if not sent.done():
                    sent.set_result(answer)
                self._begin()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # it has ended
        finally:
            self.end()
            for number, sent in enumerate(self._sent):
                if sent.done():
                    continue
                if number:
                    sent.set_result(None)
                else:
                    sent.set_exception(_CutOffError())
            self._sent.clear()

    async def _answer(self) -> Prepared | Declined:
        answer = decode_answer(await self._reader.readexactly(await self._length()))
        left, pieces = await self._length(), []
        while left:
            if not (piece := await self._reader.read(min(left, _CHUNK))):
                raise asyncio.IncompleteReadError(b"", left)
            pieces.append(piece)
            left -= len(piece)
        return msgspec.structs.replace(answer, answer=pieces) if pieces and isinstance(answer, Prepared) else answer

    async def _length(self) -> int:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return int(length)

    def _begin(self) -> None:
        """It begins with the first of those that were sent."""
        self._began_s = self._loop.time()
        if self._sent and (self._timer is None or self._sent[0].cancelled()):
            self._watch()

    def _watch(self) -> None:
        """End the child if its job takes too long: one that nobody waits for, more than a moment."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.ended or not self._sent:
            return
        limit_s = _ABANDONED_S if self._sent[0].cancelled() else self._limit_s
        left_s = self._began_s + limit_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._watch)
        else:
            self.end()

    def end(self) -> None:
        """Close the connection and end the child, whatever it is doing."""
        if self.ended:
            return
        self.ended = True
        if self._timer is not None:
            self._timer.cancel()
        self._writer.close()
        if not self._reader.at_eof():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
