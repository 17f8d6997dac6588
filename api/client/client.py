"""The api's side of the engine: starts the process, keeps it alive, carries requests to it and events back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from api.client.backoff import Backoff
from api.client.calls import Call, Calls, checked, startup_loads
from api.client.link import EngineLink
from api.client.process import ENGINE_COMMAND, SocketDir
from api.client.stream import EngineUnavailable, Inbox, OpenRequest
from engine import messages as m
from engine.config import EngineConfig
from engine.errors import EngineError, UserError
from engine.tuning import Order, Tuned

log = logging.getLogger("ktserve")

_WATCH_S = 0.25
_LOADING_S = 60.0  # an engine that loads may be silent at least that long: it imports, and shares its CPUs with others
_SILENT_S = 4.0  # without a heartbeat (`engine.heartbeat.BEAT_S`) until requests are refused
_LATE_S = 1.0  # the engine's own deadline comes first; this is for one that does not answer


class EngineClient:
    """One engine process. `on_planned` and `on_loading` are called with its plan and its progress, `on_unloaded` with
    the name of each adapter that requests can no longer ask for.

    `max_open` bounds the requests that are open at the same time; more raise EngineUnavailable (429). An engine that
    has been silent, or at one step, for `hang_s` seconds is killed (None: never). An engine that ended is started
    again, after delays that grow while engines die without service (`Backoff`); after `max_restarts` such deaths in a
    row (None: no limit) `gave_up` is set instead.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        max_open: int | None = None,
        max_restarts: int | None = None,
        hang_s: float | None = None,
    ) -> None:
        self.config = config
        self.state = "new"  # new, loading, ready, restarting, draining, dead, stopped
        self.ready: m.Ready | None = None
        self.loading: m.Loading | None = None  # the last progress of an engine that is not ready
        self.planned: m.Planned | None = None  # of the engine that started last
        self.on_planned: Callable[[m.Planned], None] | None = None
        self.on_loading: Callable[[m.Loading], None] | None = None
        self.on_unloaded: Callable[[str], None] | None = None
        self.gave_up = asyncio.Event()
        self.adapters: dict[str, m.AdapterInfo] = {}
        self.residency: dict[str, str] = {}  # of adapters: "disk", "host" or "slot"
        self.vocabulary: m.SetVocabulary | None = None  # what every engine is told of its tokens
        self.restarts = 0  # of all time
        self.backoff = Backoff()
        self._command = tuple(command)
        self._max_open = max_open or 4 * (config.max_num_seqs + config.max_queue)
        self._max_restarts = max_restarts
        self._hang_s = hang_s
        self._context = zmq.Context()
        self._link: EngineLink | None = None
        self._dir = SocketDir()
        self._open: dict[str, OpenRequest] = {}
        self._calls = Calls()
        self._wanted = startup_loads(config)  # what every engine is given before it serves, by name
        self._published: set[str] = set()  # adapters that no file is known of
        self._fatal: m.FatalError | None = None
        self._started: asyncio.Future[m.Ready] | None = None
        self._spawned = asyncio.Event()
        self._closed = False
        self._supervisor: asyncio.Task[None] | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._serves_since: float | None = None  # of the engine that is there now
        self._answered = 0  # by that engine
        self._awake_s = 0.0  # when this process last went on after it had been stopped itself
        self._restoring: asyncio.Task[None] | None = None

    # ---- life

    async def begin(self) -> None:
        """Start the engine's process, which loads while the caller does something else. `start` waits for it, and
        whatever comes of it, `shutdown` ends what was started."""
        if self._started is None:
            self._started = asyncio.get_running_loop().create_future()
            self._supervisor = asyncio.create_task(self._supervise())
            self._watchdog = asyncio.create_task(self._watch())
        await self._spawned.wait()

    async def start(self) -> m.Ready:
        """Start the engine, if `begin` has not, and wait until it serves. Raises UserError (configuration, files) or
        EngineError."""
        await self.begin()
        assert self._started is not None
        return await asyncio.shield(self._started)

    async def drain(self, timeout_s: float) -> None:
        """Refuse what is new, let what is open end; what is left after `timeout_s` is cancelled by the engine."""
        was_ready, self.state = self.state == "ready", "draining"
        if was_ready:
            with contextlib.suppress(EngineUnavailable, asyncio.TimeoutError):
                message = m.Drain(call_id=self._calls.new_id(), timeout_s=timeout_s)
                await asyncio.wait_for(self._call(message), timeout_s + 5)

    async def shutdown(self, grace_s: float = 10.0) -> None:
        """End the engine and remove the socket's directory; again it does nothing."""
        if self._closed:
            return
        self._closed = True
        loaded, self.state = self.ready is not None, "stopped"
        if self._link is not None and loaded and grace_s > 0:
            self._send(m.Shutdown())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._supervised()), grace_s)
        for task in (self._supervisor, self._watchdog, self._restoring):
            if task is not None:
                task.cancel()
        await self._supervised()
        if self._started is not None and self._started.done():
            self._started.exception()  # it may be that nobody has waited for it
        self._context.destroy(linger=0)
        self._dir.remove()

    async def _supervised(self) -> None:
        if self._supervisor is not None:
            await asyncio.wait({self._supervisor})

    @property
    def health(self) -> str:
        """The state, or "silent" if the engine process exists but does not run."""
        return "silent" if self.state == "ready" and self._silent_s() > _SILENT_S else self.state

    def _silent_s(self) -> float:
        return 0.0 if self._link is None else self._link.heartbeat.silent_s(self._awake_s)

    async def _watch(self) -> None:
        """Kill an engine that hangs; the supervisor starts another."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_S)
            now = time.monotonic()
            if now - last > 8 * _WATCH_S:  # both were stopped, perhaps: give the engine time to beat
                self._awake_s = now
            last = now
            if self._link is None or self._hang_s is None:
                continue
            loads = self.state in ("loading", "restarting")
            allowed_s = max(self._hang_s, _LOADING_S) if loads else self._hang_s
            for what, seconds in (("silent", self._silent_s()), ("at one step", self._link.heartbeat.working_s())):
                if seconds > allowed_s:
                    log.error("the engine has been %s for %.0f s: it is killed", what, seconds)
                    self._link.kill()
                    break

    # ---- requests

    def submit(self, message: m.Submit, inbox: Inbox) -> OpenRequest:
        """Send a request whose events go to `inbox`. Raises EngineUnavailable if there is no engine, it drains, or too
        many are open."""
        if self.health != "ready":
            raise self.unavailable()
        if len(self._open) >= self._max_open:
            raise EngineUnavailable(f"{len(self._open)} requests are open, the most that are accepted", 429, 1.0)
        self._send(message)  # first: a message that cannot be encoded leaves nothing behind
        request = self._open[message.request_id] = OpenRequest(message.request_id, inbox, self._forget)
        if message.timeout_s is not None:
            loop = asyncio.get_running_loop()
            request.deadline = loop.call_later(message.timeout_s + _LATE_S, self._expire, message.request_id)
        return request

    def _expire(self, request_id: str) -> None:
        """A deadline that the engine let pass."""
        if request := self._take(request_id):
            request.inbox.put(m.Cancelled(request_id=request_id, reason="timeout"))
            self._send(m.Abort(request_id=request_id))

    def _take(self, request_id: str) -> OpenRequest | None:
        """The request, which ends now, if it is open."""
        request = self._open.pop(request_id, None)
        if request is not None and request.deadline is not None:
            request.deadline.cancel()
        return request

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def _forget(self, request_id: str, message: m.StopFound | m.Abort) -> None:
        """Stop listening to a request and tell the engine why."""
        if self._take(request_id) is not None:
            self._send(message)

    def unavailable(self) -> EngineUnavailable:
        """Why there is no service now."""
        if self.state == "draining" or self.state == "stopped":
            return EngineUnavailable("the server is shutting down", retry_after_s=None)
        if self.state == "dead":
            return EngineUnavailable("the engine has ended and was not restarted", retry_after_s=None)
        return EngineUnavailable(f"the engine is {self.health}")

    # ---- calls

    async def load_adapter(
        self,
        name: str,
        path: str,
        *,
        replace: bool = False,
        expert_scaling: str | None = None,
        expert_b_layout: str | None = None,
        pinned: bool = False,
    ) -> m.AdapterInfo:
        """Raises CallRefused with the engine's reason, or EngineUnavailable."""
        message = m.LoadAdapter(
            call_id=self._calls.new_id(),
            name=name,
            path=path,
            replace=replace,
            expert_scaling=expert_scaling,
            expert_b_layout=expert_b_layout,
            pinned=pinned,
        )
        # a caller that goes away does not stop the load: what the engine did must be known here
        return await asyncio.shield(asyncio.create_task(self._load(message)))

    async def _load(self, message: m.LoadAdapter) -> m.AdapterInfo:
        reply = checked(await self._call(message))
        if reply.adapter is None:
            raise EngineError(f"the engine loaded adapter {message.name!r} but did not describe it")
        self.adapters[message.name] = reply.adapter
        self._wanted[message.name] = message
        return reply.adapter

    async def tune(self, run: str, order: Order) -> Tuned:
        """What comes of an order to a tuning run. Raises CallRefused with the engine's reason, or EngineUnavailable."""
        reply = checked(await self._call(m.Tune(call_id=self._calls.new_id(), run=run, order=order)))
        if reply.adapter is not None:  # it was published, and is gone with its engine
            self.adapters[reply.adapter.name] = reply.adapter
            self._published.add(reply.adapter.name)
        if reply.tuned is None:
            raise EngineError(f"the engine answered a {type(order).__name__}, but not what came of it")
        return reply.tuned

    async def unload_adapter(self, name: str) -> None:
        await asyncio.shield(asyncio.create_task(self._unload(name)))

    async def _unload(self, name: str) -> None:
        checked(await self._call(m.UnloadAdapter(call_id=self._calls.new_id(), name=name)))
        self._wanted.pop(name, None)
        self._gone(name)

    def _gone(self, name: str) -> None:
        self.adapters.pop(name, None)
        self.residency.pop(name, None)
        if self.on_unloaded is not None:
            self.on_unloaded(name)

    def serves(self, model: str) -> bool:
        """Whether requests can ask for it: the base, or an adapter that is loaded."""
        return model in self.adapters or (self.ready is not None and model == self.ready.model_name)

    async def stats(self, timeout_s: float = 2.0) -> dict[str, Any]:
        """The engine's counters. Raises EngineUnavailable, also if it does not answer in time."""
        return (await self._look(m.GetStats(call_id=self._calls.new_id()), timeout_s)).stats or {}

    async def live(self, timeout_s: float = 2.0) -> m.Live:
        """What the engine does at this moment. Raises EngineUnavailable, also if it does not answer in time."""
        reply = await self._look(m.GetLive(call_id=self._calls.new_id()), timeout_s)
        if reply.live is None:
            raise EngineError("the engine answered, but not what it does")
        return reply.live

    async def _look(self, message: m.GetStats | m.GetLive, timeout_s: float) -> m.Reply:
        try:
            return checked(await asyncio.wait_for(self._call(message), timeout_s))
        except asyncio.TimeoutError:
            raise EngineUnavailable(f"the engine did not answer within {timeout_s:g} s") from None

    async def _call(self, message: Call) -> m.Reply:
        if self._link is None or self.ready is None:
            raise self.unavailable()
        return await self._calls.reply(message.call_id, lambda: self._send(message))

    # ---- the process

    async def _supervise(self) -> None:
        for number in itertools.count():
            self.state = "restarting" if number else "loading"
            self._serves_since, self._answered = None, 0
            status = await self._run(number)
            served_s = 0.0 if self._serves_since is None else time.monotonic() - self._serves_since
            self._disconnect(f"the engine ended ({status})")
            if self.state == "stopped":
                return
            if self._started is not None and not self._started.done():
                self.state = "dead"
                self._started.set_exception(self._start_error(status))
                return
            log.error("the engine ended (%s)%s", status, f": {self._fatal.message}" if self._fatal else "")
            if self.state == "draining":
                return
            delay_s = self.backoff.died(served_s, self._answered)
            if self._max_restarts is not None and self.backoff.deaths > self._max_restarts:
                self.state = "dead"
                self.gave_up.set()
                return
            self.restarts += 1
            self.state = "restarting"
            log.warning("restart %d in %.1f s", self.restarts, delay_s)
            await asyncio.sleep(delay_s)

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
        config = self.config if number == 0 else dataclasses.replace(self.config, adapters=[])  # `_restore` decides
        payload = msgspec.json.encode(config).decode()
        command = [*self._command, "serve", "--config-json", payload]
        try:
            self._link = await EngineLink.open(
                self._context, command, self._dir.address(number), self._dir.heartbeat(number)
            )
        except OSError as error:
            return f"cannot start {command[0]}: {error.strerror}"
        finally:
            self._spawned.set()
        return await self._link.run(self._dispatch)

    def _send(self, message: m.ToEngine) -> None:
        if self._link is not None:
            self._link.send(message)

    def _dispatch(self, message: m.FromEngine) -> None:
        match message:
            case m.Tokens():
                if request := self._open.get(message.request_id):
                    request.inbox.put(message)
            case m.Finished() | m.Refused() | m.Cancelled() | m.Failed():
                self._answered += isinstance(message, m.Finished)
                if request := self._take(message.request_id):
                    request.inbox.put(message)
            case m.AdapterMoved():
                self.residency[message.name] = message.residency
            case m.Reply():
                self._calls.answer(message)
            case m.Planned():
                self.planned = message
                if self.on_planned is not None:
                    self.on_planned(message)
            case m.Loading():
                self.loading = message
                if self.on_loading is not None:
                    self.on_loading(message)
            case m.Ready():
                self._became_ready(message)
            case m.FatalError():
                self._fatal = message

    def _became_ready(self, ready: m.Ready) -> None:
        self.ready, self.loading = ready, None
        self.residency.clear()
        for name in self._published - self._wanted.keys():
            self._gone(name)
        self._published.clear()
        if self.vocabulary is not None:
            self._send(self.vocabulary)
        self._restoring = asyncio.create_task(self._restore(ready))

    async def _restore(self, ready: m.Ready) -> None:
        """Load the adapters that this engine is to have, then serve. One that cannot be loaded ends a first start; a
        restart goes on without it and tries again at the next."""
        first = self._started is not None and not self._started.done()
        for name, message in list(self._wanted.items()):
            try:
                reply = await self._call(msgspec.structs.replace(message, call_id=self._calls.new_id(), replace=False))
            except EngineUnavailable:
                return  # died again; the supervisor goes on
            if reply.adapter is not None:
                self.adapters[name] = reply.adapter
            elif first:
                self._fatal = m.FatalError(message=reply.error or f"adapter {name}", user=reply.status < 500)
                return self._send(m.Shutdown())
            else:
                self._gone(name)
                log.error("adapter %s could not be loaded again: %s", name, reply.error)
        if self.state == "restarting":
            log.info("the engine serves again")
        if self.state in ("loading", "restarting"):
            self.state, self._serves_since = "ready", time.monotonic()
        if first and self._started is not None:
            self._started.set_result(ready)

    def _disconnect(self, reason: str) -> None:
        self._link = None
        error = EngineUnavailable(reason)
        for request_id in list(self._open):
            if request := self._take(request_id):
                request.inbox.fail(error)
        self._calls.fail(error)
