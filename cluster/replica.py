"""A replica: `ktserve serve` on its node, at a port that only this machine reaches."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import yaml
import yarl
from ray import serve

from cluster.call import Call, kept_headers
from ktserve.launcher import program

_POLL_S = 0.2
_END_S = 60.0
_AT = re.compile(r"^at\s+http://127\.0\.0\.1:(\d+)/v1", re.M)


class ServerDied(RuntimeError):
    """The replica's server ended by itself; Ray starts another replica."""


class Engine:
    """The deployment's class. `settings`: lines of the file of `ktserve serve --config`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._name = serve.get_replica_context().replica_id.unique_id
        self._folder = Path(tempfile.mkdtemp(prefix=f"ktserve-replica-{self._name}-"))
        config, self._log = self._folder / "config.yaml", self._folder / "log"
        config.write_text(yaml.safe_dump({**settings, "host": "127.0.0.1", "port": 0}))
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(program("serve", "--config", str(config)), stdout=sink, stderr=sink)
        self._open = 0
        self._port = 0

    async def _ready(self) -> int:
        while not self._port:
            self.check_health()
            if found := _AT.search(self._log.read_text(errors="replace")):
                self._port = int(found[1])
                break
            await asyncio.sleep(_POLL_S)
        return self._port

    async def __call__(self, call: Call) -> AsyncIterator[Any]:
        """(status, headers), then the body as it comes. Raises ServerDied if the server ends before its answer has."""
        self._open += 1
        try:
            url = yarl.URL(f"http://127.0.0.1:{await self._ready()}{call.path}", encoded=True)
            timeout = aiohttp.ClientTimeout(total=None)  # the server has its own
            async with (
                aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session,
                session.request(call.method, url, headers=call.headers, data=call.body) as answer,
            ):
                yield answer.status, [*kept_headers(answer.headers.items()), ("x-ktserve-replica", self._name)]
                async for part in answer.content.iter_any():
                    yield part
        except (OSError, aiohttp.ClientError) as error:
            raise ServerDied(f"the replica's server ended: {error}") from None
        finally:
            self._open -= 1

    async def record_routing_stats(self) -> dict[str, int]:
        """For the router, once in a while."""
        return {"open": self._open}

    def check_health(self) -> None:
        """Ray asks; ServerDied makes it start another replica."""
        if (status := self._process.poll()) is not None:
            said = self._log.read_text(errors="replace").strip()[-1000:]
            raise ServerDied(f"the server ended with status {status}: {said}")

    def __del__(self) -> None:
        process = getattr(self, "_process", None)
        if process is not None and process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            if process.poll() is None:
                process.kill()
        if (folder := getattr(self, "_folder", None)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
