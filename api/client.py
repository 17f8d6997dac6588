"""The api's side of the engine: starts the process, keeps it alive, carries requests to it and events back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq.asyncio

from api.link import HELLO_CALL_ID, EngineLink
from api.process import SocketDir
from api.stream import EngineUnavailable, RequestStream
from engine import messages as m
from engine.config import EngineConfig
from engine.errors import EngineError, UserError

log = logging.getLogger("ktserve")

ENGINE_COMMAND = (sys.executable, "-m", "engine.main")
_PING_S = 10.0
_SILENT_S = 120.0  # a step of a large model on a slow CPU takes seconds, not minutes
_HEALTHY_S = 300.0  # an engine that lived so long has its restarts forgiven


class EngineClient:
    """One engine process. `on_loading` hears of progress, `on_ready` of every (re)start.

    `max_open` bounds the requests that are open at the same time; more raise EngineUnavailable (429).
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        max_open: int | None = None,
        max_restarts: int = 3,
        on_loading: Callable[[m.Loading], None] | None = None,
        on_ready: Callable[[m.Ready], None] | None = None,
    ) -> None:
        self.config = config
        self.state = "new"  # new, loading, ready, restarting, draining, dead, stopped
        self.ready: m.Ready | None = None
        self.adapters: dict[str, m.AdapterInfo] = {}
        self.restarts = 0
        self._command = tuple(command)
        self._max_open = max_open or 4 * (config.max_num_seqs + config.max_queue)
        self._max_restarts = max_restarts
        self._on_loading = on_loading
        self._on_ready = on_ready
        self._context = zmq.asyncio.Context()
        self._link: EngineLink | None = None
        self._dir = SocketDir()
        self._open: dict[str, RequestStream] = {}
        self._calls: dict[int, asyncio.Future[m.Reply]] = {}
        self._call_ids = itertools.count(HELLO_CALL_ID + 1)
        self._loaded: dict[str, m.LoadAdapter] = {}  # at run time: loaded again after a restart
        self._dropped: set[str] = set()  # start-up adapters that were unloaded or replaced
        self._fatal: m.FatalError | None = None
        self._started: asyncio.Future[m.Ready] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._pinger: asyncio.Task[None] | None = None
        self._heard_s = time.monotonic()
        self._reloading: asyncio.Task[None] | None = None

    # ---- life

    async def start(self) -> m.Ready:
        """Start the engine and wait until it serves. Raises UserError (configuration, files) or EngineError."""
        self._started = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise())
        self._pinger = asyncio.create_task(self._ping())
        try:
            return await asyncio.shield(self._started)
        except asyncio.CancelledError:
            await self.shutdown(grace_s=0)
            raise

    async def drain(self, timeout_s: float) -> None:
        """Refuse what is new, let what is open end; what is left after `timeout_s` is cancelled by the engine."""
        was_ready, self.state = self.state == "ready", "draining"
        if was_ready:
            with contextlib.suppress(EngineUnavailable, asyncio.TimeoutError):
                message = m.Drain(call_id=next(self._call_ids), timeout_s=timeout_s)
                await asyncio.wait_for(self._call(message), timeout_s + 5)

    async def shutdown(self, grace_s: float = 10.0) -> None:
        """End the engine and remove the socket's directory."""
        self.state = "stopped"
        if self._link is not None and grace_s > 0:
            self._send(m.Shutdown())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._supervised()), grace_s)
        for task in (self._supervisor, self._pinger, self._reloading):
            if task is not None:
                task.cancel()
        await self._supervised()
        self._context.destroy(linger=0)
        self._dir.remove()

    async def _supervised(self) -> None:
        if self._supervisor is not None:
            await asyncio.wait({self._supervisor})

    @property
    def health(self) -> str:
        """The state, or "silent" if the engine lives but has said nothing for minutes."""
        silent = self.state == "ready" and time.monotonic() - self._heard_s > _SILENT_S
        return "silent" if silent else self.state

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(_PING_S)
            if self.state == "ready":
                self._send(m.GetStats(call_id=HELLO_CALL_ID))  # any answer counts

    # ---- requests

    def submit(self, message: m.Submit) -> RequestStream:
        """Send a request. Raises EngineUnavailable if there is no engine, it drains, or too many are open."""
        if self.state != "ready":
            raise self.unavailable()
        if len(self._open) >= self._max_open:
            raise EngineUnavailable(f"{len(self._open)} requests are open, the most that are accepted", 429, 1.0)
        stream = RequestStream(message.request_id, self._forget)
        self._open[message.request_id] = stream
        self._send(message)
        return stream

    def _forget(self, request_id: str, message: m.StopFound | m.Abort) -> None:
        """Stop listening to a request and tell the engine why."""
        if self._open.pop(request_id, None) is not None and self._link is not None:
            self._send(message)

    def unavailable(self) -> EngineUnavailable:
        """Why there is no service now."""
        if self.state == "draining" or self.state == "stopped":
            return EngineUnavailable("the server is shutting down", retry_after_s=None)
        if self.state == "dead":
            return EngineUnavailable("the engine has ended and was not restarted", retry_after_s=None)
        return EngineUnavailable(f"the engine is {self.state}")

    # ---- calls

    async def load_adapter(
        self, name: str, path: str, *, replace: bool = False, expert_scaling: str | None = None
    ) -> m.AdapterInfo:
        """Raises CallRefused with the engine's reason, or EngineUnavailable."""
        message = m.LoadAdapter(
            call_id=next(self._call_ids), name=name, path=path, replace=replace, expert_scaling=expert_scaling
        )
        # a caller that goes away does not stop the load: what the engine did must be known here
        return await asyncio.shield(asyncio.create_task(self._load(message)))

    async def _load(self, message: m.LoadAdapter) -> m.AdapterInfo:
        reply = _checked(await self._call(message))
        if reply.adapter is None:
            raise EngineError(f"the engine loaded adapter {message.name!r} but did not describe it")
        self.adapters[message.name] = reply.adapter
        self._loaded[message.name] = message
        self._dropped.add(message.name)
        return reply.adapter

    async def unload_adapter(self, name: str) -> None:
        await asyncio.shield(asyncio.create_task(self._unload(name)))

    async def _unload(self, name: str) -> None:
        _checked(await self._call(m.UnloadAdapter(call_id=next(self._call_ids), name=name)))
        self.adapters.pop(name, None)
        self._loaded.pop(name, None)
        self._dropped.add(name)

    async def stats(self, timeout_s: float = 2.0) -> dict[str, Any]:
        """The engine's counters. Raises EngineUnavailable, also if it does not answer in time."""
        try:
            reply = await asyncio.wait_for(self._call(m.GetStats(call_id=next(self._call_ids))), timeout_s)
        except asyncio.TimeoutError:
            raise EngineUnavailable(f"the engine did not answer within {timeout_s:g} s") from None
        return _checked(reply).stats or {}

    async def _call(self, message: m.LoadAdapter | m.UnloadAdapter | m.GetStats | m.Drain) -> m.Reply:
        if self._link is None or (self.ready is None):
            raise self.unavailable()
        future: asyncio.Future[m.Reply] = asyncio.get_running_loop().create_future()
        self._calls[message.call_id] = future
        self._send(message)
        try:
            return await future
        finally:
            self._calls.pop(message.call_id, None)

    # ---- the process

    async def _supervise(self) -> None:
        for number in itertools.count():
            self.state = "restarting" if number else "loading"
            began = time.monotonic()
            status = await self._run(number)
            self._disconnect(f"the engine ended ({status})")
            if self.state == "stopped":
                return
            if self._started is not None and not self._started.done():
                self.state = "dead"
                self._started.set_exception(self._start_error(status))
                return
            if time.monotonic() - began > _HEALTHY_S:
                self.restarts = 0
            log.error("the engine ended (%s)%s", status, f": {self._fatal.message}" if self._fatal else "")
            if self.state == "draining" or self.restarts >= self._max_restarts or (self._fatal and self._fatal.user):
                self.state = "dead" if self.state != "draining" else "draining"
                return
            self.restarts += 1
            self.state = "restarting"
            delay = min(30.0, 0.5 * 2 ** (self.restarts - 1))
            log.warning("restart %d of %d in %.1f s", self.restarts, self._max_restarts, delay)
            await asyncio.sleep(delay)

    def _start_error(self, status: str) -> Exception:
        if self._fatal is None:
            return EngineError(f"the engine ended ({status}) before it could serve")
        if self._fatal.user:
            return UserError(self._fatal.message)
        detail = f"\n{self._fatal.detail}" if self._fatal.detail else ""
        return EngineError(f"{self._fatal.message}{detail}")

    async def _run(self, number: int) -> str:
        """One engine process, from spawn to its end; returns how it ended."""
        self._fatal = None
        address = self._dir.address(number)
        kept = [a for a in self.config.adapters if a.partition("=")[0] not in self._dropped]
        config = dataclasses.replace(self.config, adapters=kept)
        payload = msgspec.json.encode(config).decode()
        command = [*self._command, "serve", "--config-json", payload, "--address", address]
        try:
            self._link = await EngineLink.open(self._context, command, address)
        except OSError as error:
            return f"cannot start {command[0]}: {error.strerror}"
        return await self._link.run(self._dispatch)

    def _send(self, message: m.ToEngine) -> None:
        if self._link is not None:
            self._link.send(message)

    def _dispatch(self, message: m.FromEngine) -> None:
        self._heard_s = time.monotonic()
        match message:
            case m.Tokens():
                if stream := self._open.get(message.request_id):
                    stream.put(message)
            case m.Finished() | m.Refused() | m.Cancelled() | m.Failed():
                if stream := self._open.pop(message.request_id, None):
                    stream.put(message)
            case m.Reply():
                future = self._calls.get(message.call_id)
                if future is not None and not future.done():
                    future.set_result(message)
            case m.Loading():
                if self._on_loading is not None:
                    self._on_loading(message)
            case m.Ready():
                self._became_ready(message)
            case m.FatalError():
                self._fatal = message

    def _became_ready(self, ready: m.Ready) -> None:
        self.ready = ready
        self.adapters = {adapter.name: adapter for adapter in ready.adapters}
        if self._started is not None and not self._started.done():
            self.state = "ready"
            self._started.set_result(ready)
            if self._on_ready is not None:
                self._on_ready(ready)
        else:
            self._reloading = asyncio.create_task(self._reload(ready))

    async def _reload(self, ready: m.Ready) -> None:
        """After a restart: load again what was loaded at run time, then serve."""
        for name, message in list(self._loaded.items()):
            try:
                again = msgspec.structs.replace(message, call_id=next(self._call_ids), replace=True)
                reply = await self._call(again)
            except EngineUnavailable:
                return  # died again; the supervisor goes on
            if reply.ok and reply.adapter is not None:
                self.adapters[name] = reply.adapter
            else:
                log.error("adapter %s could not be loaded again: %s", name, reply.error)
        if self.state == "restarting":
            self.state = "ready"
            log.info("the engine serves again")
            if self._on_ready is not None:
                self._on_ready(ready)

    def _disconnect(self, reason: str) -> None:
        self._link = None
        error = EngineUnavailable(reason)
        for stream in self._open.values():
            stream.fail(error)
        self._open.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)


class CallRefused(UserError):
    """The engine answered a call with an error of the caller's making."""

    def __init__(self, message: str, status: int, field: str | None) -> None:
        super().__init__(message, field)
        self.status = status if status >= 400 else 400


def _checked(reply: m.Reply) -> m.Reply:
    if not reply.ok:
        raise CallRefused(reply.error or "the engine gave no reason", reply.status, reply.field)
    return reply
