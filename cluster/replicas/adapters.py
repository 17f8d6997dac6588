"""A replica's part of adapters that come and go at run time: what was done at one replica is done at each before it
answers a request that is to see it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from cluster.call import Call
from cluster.replicas.directory import Catalogue

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_LOADS, _UNLOADS = (LOAD, "/load_lora_adapter"), (UNLOAD, "/unload_lora_adapter")
_Fetch = Callable[[Call], Awaitable[tuple[int, bytes]]]


class Adapters:
    """`directory`: the handle of a `Directory`. `fetch` asks this replica's server: status and body."""

    def __init__(self, directory: Any, fetch: _Fetch) -> None:
        self._directory, self._fetch = directory, fetch
        self._catalogue = Catalogue()
        self._done: dict[str, int] = {}  # of each adapter, the number of the change that the server has seen
        self._failed: dict[str, bytes] = {}  # what the server said to a change that another replica's took
        self._lock = asyncio.Lock()

    async def answer(self, call: Call) -> tuple[int, bytes] | None:
        """To a load or an unload, and to a request for an adapter that this replica cannot load; None: the server
        answers."""
        if changes_adapters(call):
            return await self._change(call)
        if call.catalogue > self._catalogue.number or call.model in self._failed:
            async with self._lock:
                await self._catch_up()
        if call.model in self._failed:
            said = self._failed[call.model].decode(errors="replace")[:500]
            message = f"this replica could not follow a change of {call.model!r} that another one made: {said}"
            return 503, json.dumps({"error": {"message": message, "type": "server_error", "code": "adapter"}}).encode()
        return None

    async def tell(self) -> None:
        """A directory that has restarted, as it does at an update, learns what there is."""
        if self._catalogue.number:
            await self._directory.catalogue.remote(self._catalogue)

    async def _change(self, call: Call) -> tuple[int, bytes]:
        async with self._lock:
            await self._catch_up()
            status, said = await self._fetch(call)
            if status == 200:
                name = json.loads(call.body)["lora_name"]
                catalogue = await self._directory.record.remote(name, call)
                self._done[name] = catalogue.changes[name].number
                self._failed.pop(name, None)
                await self._apply(catalogue)
            return status, said

    async def _catch_up(self) -> None:
        await self._apply(await self._directory.catalogue.remote(self._catalogue))

    async def _apply(self, catalogue: Catalogue) -> None:
        for name, change in catalogue.changes.items():
            if self._done.get(name) == change.number:
                continue
            status, said = await self._fetch(_again(change.call))
            if status == 200 or (status == 404 and _unloads(change.call)):  # it was never here
                self._done[name] = change.number
                self._failed.pop(name, None)
            else:
                self._failed[name] = said
        self._catalogue = catalogue


def changes_adapters(call: Call) -> bool:
    """Whether it loads or unloads one."""
    return call.method == "POST" and _path(call) in (*_LOADS, *_UNLOADS)


def _unloads(call: Call) -> bool:
    return _path(call) in _UNLOADS


def _path(call: Call) -> str:
    return call.path.partition("?")[0]


def _again(call: Call) -> Call:
    """As it is to be made at another server, whatever that has under the name."""
    if _unloads(call):
        return call
    return replace(call, body=json.dumps({**json.loads(call.body), "replace": True}).encode())
