"""The engine client alone, against the fake engine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import pytest

from api import client as client_module
from api.client import EngineClient
from api.stream import EngineUnavailable
from engine import messages as m
from engine.config import EngineConfig
from engine.errors import EngineError, UserError
from scheduler.request import SamplingParams
from tests.api.conftest import FAKE

COMMAND = (sys.executable, str(FAKE))


def client(*adapters: str, **options: Any) -> EngineClient:
    config = EngineConfig(model="tiny", adapters=[f"{name}=/x" for name in adapters])
    return EngineClient(config, **{"command": COMMAND, **options})


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def submit(request_id: str, adapter: str | None = None, length: int = 5) -> m.Submit:
    return m.Submit(
        request_id=request_id,
        prompt=list(range(1, length + 1)),
        adapter=adapter,
        sampling=SamplingParams(max_tokens=99),
    )


async def read(stream: Any) -> list[Any]:
    return [event async for event in stream]


def test_events_end_with_one_terminal_event() -> None:
    async def test() -> None:
        stages: list[m.Loading] = []
        c = client(on_loading=stages.append)
        ready = await c.start()
        assert ready.model_name == "tiny" and [loading.done for loading in stages] == [1, 2, 3]
        *tokens, last = await read(c.submit(submit("a")))
        assert [token for event in tokens for token in event.tokens] == [1, 2, 3, 4, 5]
        assert isinstance(last, m.Finished) and last.output_tokens == 5
        await c.shutdown()

    run(test())


def test_tokens_nobody_reads_are_merged() -> None:
    async def test() -> None:
        c = client("burst")
        await c.start()
        stream = c.submit(submit("a", "burst", 50))
        await c.stats()  # its answer comes after the burst
        *parts, last = await read(stream)
        assert [token for part in parts for token in part.tokens] == list(range(1, 51))
        assert len(parts) <= 10 and parts[0].cached_tokens == 48 and isinstance(last, m.Finished)
        await c.shutdown()

    run(test())


def test_open_requests_are_bounded() -> None:
    async def test() -> None:
        c = client("silent", max_open=2)
        await c.start()
        streams = [c.submit(submit(str(i), "silent")) for i in range(2)]
        with pytest.raises(EngineUnavailable) as caught:
            c.submit(submit("c", "silent"))
        assert caught.value.status == 429
        streams[0].abort()
        streams.append(c.submit(submit("d", "silent")))
        with streams[1], streams[2]:
            assert (await c.stats())["running"] == 2
        assert (await c.stats())["running"] == 0, "leaving the context aborts"
        await c.shutdown()

    run(test())


def test_an_aborted_stream_ends_for_its_reader() -> None:
    async def test() -> None:
        c = client("silent")
        await c.start()
        stream = c.submit(submit("a", "silent"))
        reader = asyncio.create_task(read(stream))
        await asyncio.sleep(0.05)
        stream.abort()
        assert await reader == []
        await c.shutdown()

    run(test())


def test_two_engines_in_one_process() -> None:
    async def test() -> None:
        one, two = client(), client()
        await asyncio.gather(one.start(), two.start())
        for c in (one, two):
            assert len(await read(c.submit(submit("same id")))) == 6
        await asyncio.gather(one.shutdown(), two.shutdown())

    run(test())


def test_an_engine_that_cannot_start() -> None:
    async def test() -> None:
        c = client(command=("/nowhere/engine",))
        with pytest.raises(EngineError, match="cannot start /nowhere/engine"):
            await c.start()
        await c.shutdown()
        c = client(command=(sys.executable, "-c", "raise SystemExit(9)"))
        with pytest.raises(EngineError, match="status 9"):
            await c.start()
        assert c.state == "dead"
        with pytest.raises(EngineUnavailable):
            c.submit(submit("a"))
        await c.shutdown()

    run(test())


def test_the_engines_own_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        c = client()
        with pytest.raises(UserError, match="no memory"):
            await c.start()
        await c.shutdown()

    monkeypatch.setenv("FAKE_ENGINE", '{"fatal": "no memory"}')
    run(test())


def test_a_start_can_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        c = client()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(c.start(), 0.3)
        assert c.state == "stopped" and not c._dir.path.exists()

    monkeypatch.setenv("FAKE_ENGINE", '{"start_delay_s": 60}')
    run(test())


def test_what_cannot_be_read_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        c = client("garbage", max_restarts=0)
        await c.start()
        with pytest.raises(EngineUnavailable, match="signal 9"):
            await read(c.submit(submit("a", "garbage")))
        await c.shutdown()

    run(test())


def test_a_stopped_engine_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        c = client()
        await c.start()
        pid = c._link._process.pid  # type: ignore[union-attr]
        await asyncio.sleep(0.5)
        assert c.health == "ready", "pings are answered"
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineUnavailable, match="within"):
            await c.stats(timeout_s=0.3)
        await asyncio.sleep(0.3)
        assert (c.state, c.health) == ("ready", "silent")
        await c.shutdown(grace_s=0.2)

    monkeypatch.setattr(client_module, "_PING_S", 0.05)
    monkeypatch.setattr(client_module, "_SILENT_S", 0.4)
    run(test())
