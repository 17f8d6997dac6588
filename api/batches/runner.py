"""Answers the batches' lines, each as a request to the application itself, and brings every batch to its end.

validating -> in_progress -> finalizing -> completed, expired      any of them, cancelled: -> cancelling -> cancelled
     `-> failed

Whatever is not committed when the process is killed is done again after the next start: a batch goes on from what the
store holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
import uuid
from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.types import ASGIApp

from api.batches.call import Response, call
from api.batches.lines import Checker, RequestLine, read_line
from api.batches.output import answer, assemble, failure
from api.batches.records import Answered, BatchRecord, Status
from api.batches.service import Batches
from api.batches.store import Line, Store, line_errors
from api.client.client import EngineClient
from api.database import DiskFullError
from api.tenants.record import Tenant

log = logging.getLogger("ktserve")
_LOOK_S = 0.1  # for an engine that does not serve now
_RETRY_S = 5.0  # after a fault of ours, or a full disk
_FETCHED = 64
_DROPPED = 2000
_LARGE = 2**16  # bytes of a line
_LARGE_IN_FLIGHT = 2
_SUSPICIOUS, _GIVEN_UP = 2, 5  # engines that ended while they had a line: it is tried alone, then no more
_FAULTS = 3  # answers of 500 and more until one counts
_SWEEP_S = 60.0
_STREAM = failure("stream_not_supported", "stream: a request of a batch cannot be streamed")


class Runner:
    """`run` until cancelled. `app` answers the lines."""

    def __init__(
        self,
        app: ASGIApp,
        batches: Batches,
        client: EngineClient,
        tenant_named: Callable[[str], Tenant | None],
        in_flight: int,
    ) -> None:
        self._app = app
        self._batches = batches
        self._client = client
        self._tenant_named = tenant_named
        self._places = asyncio.Semaphore(in_flight)
        self._large = asyncio.Semaphore(_LARGE_IN_FLIGHT)
        self._suspects = asyncio.Lock()
        self._validating = asyncio.Lock()
        self._turns: dict[str, asyncio.Lock] = {}  # of a tenant's batches, one after another
        self._open: dict[str, asyncio.Task[None]] = {}
        self._working: dict[str, asyncio.Task[None]] = {}  # what a cancel interrupts
        self._answered: list[tuple[Answered, asyncio.Future[None]]] = []
        self._arrived = asyncio.Event()

    async def run(self) -> None:
        committer = asyncio.create_task(self._commit_answers())
        try:
            for number in await self._batches.ask(Store.ended_with_lines):
                await self._drop_lines(number)
            for batch in await self._batches.ask(Store.open_batches):
                self._take(batch)
            self._batches.changed = self._take
            while True:
                try:
                    await self._batches.delete_expired_files()
                except (OSError, sqlite3.Error, DiskFullError) as error:
                    log.error("expired files could not be deleted: %s", error)
                await asyncio.sleep(_SWEEP_S)
        finally:
            self._batches.changed = lambda batch: None
            tasks = [*self._open.values(), committer]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, batch: BatchRecord) -> None:
        """A batch is new, or is to be cancelled."""
        if batch.id in self._working:
            self._working[batch.id].cancel()
        elif batch.id not in self._open:
            task = self._open[batch.id] = asyncio.create_task(self._process(batch.id))
            task.add_done_callback(lambda _: self._open.pop(batch.id, None))

    # ---- one batch

    async def _process(self, batch_id: str) -> None:
        while True:
            try:
                await self._work_until_interrupted(batch_id)
                return await self._end(batch_id)
            except DiskFullError as error:
                log.error("batch %s: %s", batch_id, error)
            except (
                Exception
            ):  # a fault of ours must not lose the batch: what is committed stays, the rest is done again
                log.exception("batch %s stopped and goes on in %g s", batch_id, _RETRY_S)
            await asyncio.sleep(_RETRY_S)

    async def _work_until_interrupted(self, batch_id: str) -> None:
        """Until all is answered, the window is over, or somebody cancels the batch."""
        batch = await self._known(batch_id)
        work = self._working[batch_id] = asyncio.create_task(self._work(batch))
        try:
            await asyncio.wait({work}, timeout=max(0.0, batch.expires_at - time.time()))
        finally:
            del self._working[batch_id]
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _known(self, batch_id: str) -> BatchRecord:
        batch = await self._batches.ask(Store.batch, batch_id)
        if batch is None:
            raise LookupError(f"batch {batch_id} has vanished from the store")
        return batch

    async def _work(self, batch: BatchRecord) -> None:
        if batch.status is Status.VALIDATING:
            async with self._validating:
                if not await self._validate(batch):
                    return
        if batch.status in (Status.VALIDATING, Status.IN_PROGRESS):
            async with self._turns.setdefault(batch.tenant, asyncio.Lock()):
                await self._answer_lines(batch)

    async def _end(self, batch_id: str) -> None:
        """Put the answers into files. Lines without one are left only if the batch was cancelled or is too late."""
        ask, now = self._batches.ask, int(time.time())
        await ask(Store.move, batch_id, Status.FINALIZING, (Status.VALIDATING, Status.IN_PROGRESS), finalizing_at=now)
        batch = await self._known(batch_id)
        if batch.status is not Status.FAILED:
            if checked := batch.in_progress_at is not None:
                output, errors = await assemble(self._batches, batch)
            else:  # which lines there are is not known
                output = errors = None
            late = not checked or bool(await ask(Store.unanswered, batch.number, 0, 1))
            to = Status.CANCELLED if batch.status is Status.CANCELLING else Status.EXPIRED if late else Status.COMPLETED
            ids = {
                "output_file_id": None if output is None else output.id,
                "error_file_id": None if errors is None else errors.id,
            }
            files = [file for file in (output, errors) if file is not None]
            await ask(Store.end, batch_id, to, files, **ids, **{f"{to.value}_at": int(time.time())})
            log.info("batch %s is %s: %d answers, %d errors", batch_id, to.value, batch.completed, batch.failed)
        await self._drop_lines(batch.number)

    async def _drop_lines(self, number: int) -> None:
        while await self._batches.ask(Store.drop_lines, number, _DROPPED):
            pass

    # ---- its lines

    async def _validate(self, batch: BatchRecord) -> bool:
        """Note where each line stands. A file with a wrong line fails the batch."""
        ask, config = self._batches.ask, self._batches.config
        await self._drop_lines(batch.number)  # of a start that was killed here
        path = self._batches.path(batch.input_file_id)
        with Checker(
            path, batch.endpoint, max_body_bytes=config.max_body_bytes, max_lines=config.max_batch_lines
        ) as checker:
            while not checker.at_end:
                lines = await self._batches.in_thread(checker.some)
                checker.errors += line_errors(await ask(Store.add_lines, batch.number, lines))
        now = int(time.time())
        if checker.errors:
            errors = sorted(checker.errors, key=lambda error: error.line or 0)[:50]
            await ask(Store.move, batch.id, Status.FAILED, (Status.VALIDATING,), failed_at=now, errors=errors)
            return False
        moved = await ask(
            Store.move, batch.id, Status.IN_PROGRESS, (Status.VALIDATING,), in_progress_at=now, total=checker.found
        )
        return moved is not None

    async def _answer_lines(self, batch: BatchRecord) -> None:
        after, running = 0, set[asyncio.Task[None]]()
        try:
            while lines := await self._batches.ask(Store.unanswered, batch.number, after, _FETCHED):
                for line in lines:
                    after = line[0]
                    await self._engine_serves()
                    await self._places.acquire()
                    task = asyncio.create_task(self._answer_line(batch, line))
                    running.add(task)
                    task.add_done_callback(lambda _: self._places.release())
                    for done in [task for task in running if task.done()]:
                        running.remove(done)
                        done.result()
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _answer_line(self, batch: BatchRecord, line: Line) -> None:
        number, start, size = line
        async with self._room_for(size):
            request = await self._batches.in_thread(read_line, self._batches.path(batch.input_file_id), start, size)
            ok, data = await self._ask(batch, request)
        future = asyncio.get_running_loop().create_future()
        self._answered.append((Answered(batch.number, number, ok, data), future))
        self._arrived.set()
        await future

    @contextlib.asynccontextmanager
    async def _room_for(self, size: int) -> AsyncIterator[None]:
        if size <= _LARGE:
            yield
        else:
            async with self._large:
                yield

    async def _ask(self, batch: BatchRecord, line: RequestLine) -> tuple[bool, bytes]:
        """(whether it is an answer and no error, what the store keeps). What only came at the wrong time is asked
        again."""
        if _streams(line):
            return False, _STREAM
        deaths = faults = 0
        while True:
            await self._engine_serves()
            tenant = self._tenant_named(batch.tenant)
            if tenant is None:
                return False, failure("tenant_not_found", "the server has no key of this tenant any more")
            async with self._suspects if deaths >= _SUSPICIOUS else contextlib.nullcontext():
                await self._engine_serves()  # the suspect before may have ended it
                restarts = self._client.restarts
                response = await call(self._app, batch.endpoint, bytes(line.body), tenant.for_batches())
                died = self._client.restarts != restarts or self._client.state != "ready"
            deaths += died
            faults += response.status >= 500 and response.status != 503 and not died
            if deaths >= _GIVEN_UP:
                return False, failure("engine_ended", f"the engine ended {deaths} times while it had this request")
            again = response.status in (429, 499, 503) or (died and response.status != 200)
            if not again and (response.status < 500 or faults >= _FAULTS):
                if b"json" not in response.headers.get(b"content-type", b""):
                    return False, _STREAM
                return 200 <= response.status < 300, _kept(response)
            await asyncio.sleep(_retry_after_s(response))

    async def _engine_serves(self) -> None:
        while self._client.health != "ready":
            await asyncio.sleep(_LOOK_S)

    async def _commit_answers(self) -> None:
        """What has come in since the last transaction is the next one."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            group, self._answered = self._answered, []
            while True:
                try:
                    await self._batches.ask(Store.answer, [answered for answered, _ in group])
                    break
                except DiskFullError as error:
                    log.error("answers of batches: %s; trying again in %g s", error, _RETRY_S)
                    await asyncio.sleep(_RETRY_S)
                except (OSError, sqlite3.Error) as error:
                    for _, future in group:
                        if not future.done():
                            future.set_exception(error)
                    break
            for _, future in group:
                if not future.done():
                    future.set_result(None)


def _streams(line: RequestLine) -> bool:
    with contextlib.suppress(msgspec.DecodeError, RecursionError):  # the endpoint says what is wrong with it
        body = msgspec.json.decode(line.body, type=dict[str, msgspec.Raw])
        return bytes(body.get("stream", b"")) == b"true"
    return False


def _retry_after_s(response: Response) -> float:
    given = response.headers.get(b"retry-after", b"")
    return min(60.0, float(given)) if given.isdigit() else 0.5


def _kept(response: Response) -> bytes:
    request_id = response.headers.get(b"x-request-id", b"").decode("latin-1") or f"req_{uuid.uuid4().hex}"
    return answer(response.status, request_id, bytes(response.body))
