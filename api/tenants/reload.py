"""SIGHUP: the files with keys and tenants are read again, the usage log is opened again. Without any of them it is
logged and changes nothing: it never ends the server."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from api.config import ServeConfig
from api.tenants.keys import Keys, keys_of
from api.tenants.limits import Limits
from api.tenants.usage import UsageLog
from engine.errors import UserError

log = logging.getLogger("ktserve")


def has_key_files(config: ServeConfig) -> bool:
    return any((config.tenants, config.api_keys_file, config.admin_key_file))


class _Tenants(Protocol):
    config: ServeConfig
    keys: Keys
    limits: Limits
    batch_limits: Limits
    usage: UsageLog | None


class Reload:
    """One reload after another, in the order of the signals. What cannot be read leaves the tenants as they are."""

    def __init__(self, service: _Tenants) -> None:
        self._service = service
        self._running: asyncio.Task[None] | None = None
        self._again = False

    def __call__(self) -> None:
        if self._service.usage is not None:
            self._service.usage.reopen()
        elif not has_key_files(self._service.config):
            log.info("SIGHUP: there are no keys, tenants or usage log to read again")
        if self._running is not None:  # the file may have changed after that one has read it
            self._again = True
            return
        self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        config = self._service.config
        try:
            while has_key_files(config):
                self._again = False
                try:
                    keys = await asyncio.to_thread(keys_of, config, self._service.keys)
                except UserError as error:
                    log.error("the tenants stay as they are: %s", error)
                else:
                    self._service.keys = keys
                    for limits in (self._service.limits, self._service.batch_limits):
                        limits.keep(tenant.name for tenant in keys.tenants)
                    log.info("tenants: %d keys of %d tenants", keys.count, len({t.name for t in keys.tenants}))
                if not self._again:
                    break
        finally:
            self._running = None
