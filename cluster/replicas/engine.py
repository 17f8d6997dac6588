"""A replica: `ktserve serve` on its node, at a port that only this machine reaches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import yaml
import yarl
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from api.errors import ApiError
from cluster.call import DIED, Call, kept_headers
from cluster.replicas.adapters import Adapters
from cluster.replicas.directory import Report
from cluster.replicas.metrics import resident
from cluster.replicas.shares import write_share
from cluster.scaling.first_tokens import FirstTokens
from ktserve.launcher import die_with_parent, program

_POLL_S = 0.2
_REPORT_S = 5.0
_END_S = 60.0
_AT = re.compile(r"^at\s+http://127\.0\.0\.1:(\d+)/v1", re.M)


class ServerDied(RuntimeError):
    """The replica's server ended by itself; Ray starts another replica."""


class Engine:
    """The deployment's class. `settings`: lines of the file of `ktserve serve --config`. `directory`: the handle of
    the deployment of a `Directory`. `first_tokens`: the autoscaler is to hear of them; ValueError if the server does
    not tell. Made when its server is ready, so that an update stops no replica before."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: dict[str, Any], directory: Any, first_tokens: bool = False
    ) -> None:
        self._name = serve.get_replica_context().replica_id.unique_id
        self._directory = directory
        self._folder = Path(tempfile.mkdtemp(prefix=f"ktserve-replica-{self._name}-"))
        self._log, self._count, self._reported_s = self._folder / "log", 1, 0.0
        self._tenants = Path(settings["tenants"]) if settings.get("tenants") else None
        if self._tenants is not None:
            settings = {**settings, "tenants": str(self._share)}
            write_share(self._tenants, self._share, self._count)
        self._resident: dict[str, Any] = {}
        self._admin_key = _admin_key(settings)
        config = self._folder / "config.yaml"
        config.touch(mode=0o600)  # there may be keys in it
        config.write_text(yaml.safe_dump({**settings, "host": "127.0.0.1", "port": 0}))
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(
                program("serve", "--config", str(config)), stdout=sink, stderr=sink, preexec_fn=die_with_parent()
            )
        timeout = aiohttp.ClientTimeout(total=None)  # the server has its own
        self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False)
        self._port = await self._ready()
        self._adapters = Adapters(directory, self._fetch)
        self._first_tokens = FirstTokens() if first_tokens else None
        await self.record_autoscaling_stats()
        await self._report()

    async def _ready(self) -> int:
        while True:
            self.check_health()
            if found := _AT.search(self._log.read_text(errors="replace")):
                return int(found[1])
            await asyncio.sleep(_POLL_S)

    async def __call__(self, call: Call) -> AsyncIterator[Any]:
        """(status, headers), then the body as it comes. A server that ends before it answers is a 503 with `DIED`, so
        that another replica can be asked; ServerDied if it ends after that."""
        begun = False
        try:
            answer = await self._adapters.answer(call)
            if answer is not None:
                status, said = answer
                yield status, [("content-type", "application/json"), ("x-ktserve-replica", self._name)]
                yield said
                return
            async with self._ask(call) as stream:
                begun = True
                yield stream.status, [*kept_headers(stream.headers.items()), ("x-ktserve-replica", self._name)]
                async for part in stream.content.iter_any():
                    yield part
        except (OSError, aiohttp.ClientError) as error:
            if begun:
                raise ServerDied(f"the replica's server ended: {error}") from None
            refused = ApiError(503, "the replica's server ended; ask again", code="not_available", retry_after_s=1.0)
            yield 503, [("content-type", "application/json"), ("x-ktserve-replica", self._name), (DIED, "1")]
            yield json.dumps(refused.body()).encode()

    def _ask(self, call: Call) -> Any:
        url = yarl.URL(f"http://127.0.0.1:{self._port}{call.path}", encoded=True)
        return self._session.request(call.method, url, headers=call.headers, data=call.body)

    async def _fetch(self, call: Call) -> tuple[int, bytes]:
        async with self._ask(call) as answer:
            return answer.status, await answer.read()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Serve asks every second: the moment to tell the directory how the server does. For the routers: where the
        adapters were at the last report, and its number; nothing where the server does not tell."""
        if time.monotonic() - self._reported_s >= _REPORT_S:
            await self._report()
        return self._resident

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks every few seconds where it scales: what `ByFirstTokens` reads."""
        if self._first_tokens is None:
            return {}
        status, page = await self._metrics()
        if status != 200:
            raise ValueError(f"ttft_target_s: the server's /metrics answer {status}; with API keys, set admin_key too")
        return self._first_tokens.since(page)

    async def _metrics(self) -> tuple[int, str]:
        key = (("Authorization", f"Bearer {self._admin_key}"),) if self._admin_key else ()
        status, page = await self._fetch(Call("GET", "/metrics", key, b""))
        return status, page.decode(errors="replace")

    async def _report(self) -> None:
        self._reported_s = time.monotonic()
        # neither a server that has ended nor a directory that is being restarted is for this to handle
        with contextlib.suppress(OSError, aiohttp.ClientError, ValueError, RayError, RayServeException):
            await self._adapters.tell()
            health = json.loads((await self._fetch(Call("GET", "/health", (), b"")))[1])
            status, page = await self._metrics()
            report = Report(str(health["status"]), page if status == 200 else "")
            self._resident = {"report": self._resident.get("report", 0) + 1, **resident(page)} if status == 200 else {}
            self._follow(await self._directory.report.remote(self._name, report))

    def _follow(self, replicas: int) -> None:
        """Their number changed: so does this one's part of the tenants' limits."""
        if self._tenants is not None and replicas != self._count:
            self._count = replicas
            write_share(self._tenants, self._share, replicas)
            self._process.send_signal(signal.SIGHUP)

    @property
    def _share(self) -> Path:
        return self._folder / "tenants.yaml"

    def check_health(self) -> None:
        """Ray asks; ServerDied makes it start another replica."""
        if (status := self._process.poll()) is not None:
            said = self._log.read_text(errors="replace").strip()[-1000:]
            raise ServerDied(f"the server ended with status {status}: {said}")

    def __del__(self) -> None:
        if (directory := getattr(self, "_directory", None)) is not None:
            with contextlib.suppress(RayError, RayServeException):
                directory.leave.remote(self._name)
        process = getattr(self, "_process", None)
        if process is not None and process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            if process.poll() is None:
                process.kill()
        if (folder := getattr(self, "_folder", None)) is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _admin_key(settings: dict[str, Any]) -> str:
    """Of the server, "" if it has none."""
    if settings.get("admin_key"):
        return str(settings["admin_key"])
    if settings.get("admin_key_file"):
        return Path(settings["admin_key_file"]).read_text(encoding="utf-8").strip()
    return os.environ.get("KTSERVE_ADMIN_KEY", "")
