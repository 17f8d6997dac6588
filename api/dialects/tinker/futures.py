"""Futures: what Tinker's clients have asked for, and fetch when it is there."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine
from typing import Any

from api.client.calls import CallRefused
from api.errors import ApiError, shortened
from api.tenants.record import Tenant
from engine.errors import KtserveError

log = logging.getLogger("ktserve")
_FUTURES = 4096  # of a tenant
_KEPT_S, _KEPT_BYTES = 60.0, 256 << 20  # of answers: after they were fetched; of a tenant
_WAIT_S = 20.0  # for a future, in one request

Result = dict[str, Any] | bytes  # JSON or protobuf


class Future:
    """What a request will be answered; `fetched_s`: when it was."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self.fetched_s: float | None = None
        self.size = 0

    @property
    def done(self) -> bool:
        return self.result.done()

    def fail(self, error: BaseException) -> None:
        """Of what never starts, or has raised `error`."""
        self.result.set_exception(error)
        self.result.exception()  # whoever fetches it is told; perhaps nobody does


class Futures:
    """Of all tenants; what is another tenant's is as unknown."""

    def __init__(self) -> None:
        self._futures: dict[str, Future] = {}
        self._working: set[asyncio.Task[Result]] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._futures

    def drop(self, key: str) -> None:
        """Of one that was reserved and never started."""
        del self._futures[key]

    def add(self, tenant: Tenant, work: Coroutine[Any, Any, Result]) -> str:
        """An id under which what comes of `work` is fetched. Raises ApiError 429."""
        try:
            key, future = self.reserve(tenant)
        except ApiError:
            work.close()
            raise
        self.start(work, future)
        return key

    def reserve(self, tenant: Tenant) -> tuple[str, Future]:
        """Answers that were fetched a while ago are forgotten, and the oldest where a tenant has too much of them.
        Raises ApiError 429."""
        now = time.monotonic()
        own = {key: each for key, each in self._futures.items() if each.tenant == tenant.name}
        held = sum(each.size for each in own.values())
        left = len(own)
        for key, each in own.items():
            old = each.fetched_s is not None and now - each.fetched_s > _KEPT_S
            if each.done and (old or held > _KEPT_BYTES or left >= _FUTURES):
                del self._futures[key]
                held, left = held - each.size, left - 1
        if left >= _FUTURES:
            message = f"{_FUTURES} requests have not ended: fetch some"
            raise ApiError(429, message, code="too_many", retry_after_s=1.0)
        key, future = uuid.uuid4().hex, Future(tenant.name)
        self._futures[key] = future
        return key, future

    def start(self, work: Coroutine[Any, Any, Result], of: Future) -> None:
        task, future = asyncio.create_task(work), of.result
        self._working.add(task)

        def ended(task: asyncio.Task[Result]) -> None:
            self._working.discard(task)
            if task.cancelled():
                future.cancel()
            elif (error := task.exception()) is not None:
                if not isinstance(error, KtserveError):  # a fault of ours, or of the disk
                    log.error("a request of Tinker's API failed", exc_info=error)
                    error = ApiError(500, f"the request failed: {type(error).__name__}")
                of.fail(error)
            else:
                result = task.result()
                of.size = len(result)
                future.set_result(result)

        task.add_done_callback(ended)

    async def fetch(self, tenant: Tenant, key: str) -> Result | None:
        """What came of it; None: not yet. An error is part of the answer. Raises ApiError 410 if nobody knows it."""
        future = self._futures.get(key)
        if future is None or future.tenant != tenant.name:
            raise ApiError(410, f"there is no request {shortened(key)} (any more)", code="gone")
        await asyncio.wait({future.result}, timeout=_WAIT_S)
        if not future.done:
            return None
        future.fetched_s = time.monotonic()
        try:
            return future.result.result()
        except (KtserveError, asyncio.CancelledError) as error:
            user = isinstance(error, CallRefused | ApiError) and error.status < 500
            return {"error": str(error) or "the server is shutting down", "category": "user" if user else "server"}
