"""The engine client alone, against the fake engine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from api.client import client as client_module
from api.client.calls import startup_loads
from api.client.client import EngineClient
from api.client.stream import EngineUnavailable, Inbox, OpenRequest, merged
from engine import messages as m
from engine.config import EngineConfig
from engine.errors import EngineError, UserError
from scheduler.request import SamplingParams
from testing.waiting import PATIENCE_S
from tests.api.conftest import FAKE, ROOT

COMMAND = (sys.executable, str(FAKE))


@pytest.fixture(autouse=True)
def the_fake_finds_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not installed too."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture(autouse=True)
def a_busy_machine_is_not_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many processes start at once here, and one of them may not run for seconds. Tests of silence set their own."""
    monkeypatch.setattr(client_module, "_SILENT_S", PATIENCE_S)


def client(*adapters: str, **options: Any) -> EngineClient:
    config = EngineConfig(model="tiny", adapters=[f"{name}=/x" for name in adapters])
    return EngineClient(config, **{"command": COMMAND, **options})


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, PATIENCE_S))


async def until(check: Callable[[], bool]) -> None:
    while not check():
        await asyncio.sleep(0.02)


def submit(request_id: str, adapter: str | None = None, length: int = 5, timeout_s: float | None = None) -> m.Submit:
    return m.Submit(
        request_id=request_id,
        timeout_s=timeout_s,
        prompt=list(range(1, length + 1)),
        adapter=adapter,
        sampling=SamplingParams(max_tokens=99),
    )


def ask(c: EngineClient, *what: Any, **more: Any) -> OpenRequest:
    return c.submit(submit(*what, **more), Inbox())


async def read(request: OpenRequest) -> list[Any]:
    """All events of a request, up to the terminal one."""
    events: list[Any] = []
    while not events or isinstance(events[-1], m.Tokens):
        if not (new := await request.inbox.take()):
            break
        events += new
    return events


def test_events_end_with_one_terminal_event() -> None:
    async def test() -> None:
        stages: list[m.Loading] = []
        c = client()
        c.on_loading = stages.append
        ready = await c.start()
        assert ready.model_name == "tiny" and [loading.done for loading in stages] == [1, 2, 3]
        *tokens, last = await read(ask(c, "a"))
        assert [token for event in tokens for token in event.tokens] == [1, 2, 3, 4, 5]
        assert isinstance(last, m.Finished) and last.output_tokens == 5
        await c.shutdown()

    run(test())


def test_an_engine_that_was_begun_is_the_one_that_is_waited_for() -> None:
    async def test() -> None:
        c = client()
        await c.begin()
        process = c._link._process.pid if c._link is not None else None
        await c.begin()
        await c.start()
        assert c.state == "ready" and c._link is not None and c._link._process.pid == process
        await c.shutdown()
        await c.shutdown()
        assert not c._dir.path.exists()

    run(test())


def test_an_engine_that_was_begun_ends_though_nobody_waits_for_it(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        c = client()
        await c.begin()
        process = c._link._process if c._link is not None else None
        await c.shutdown(0)
        assert process is not None and process.returncode is not None

    run(test())
    assert "never retrieved" not in caplog.text


def test_tokens_that_nobody_reads_wait_and_can_be_merged() -> None:
    async def test() -> None:
        c = client("burst")
        await c.start()
        request = ask(c, "a", "burst", 50)
        await until(lambda: len(request.inbox._events) == 51)
        *parts, last = await request.inbox.take()
        whole = merged(parts)
        assert whole.tokens == list(range(1, 51)) and whole.cached_tokens == 48 and isinstance(last, m.Finished)
        await c.shutdown()

    run(test())


def test_several_requests_share_an_inbox() -> None:
    async def test() -> None:
        c = client("silent")
        await c.start()
        inbox = Inbox()
        c.submit(submit("never", "silent"), inbox).abort()
        for name in ("a", "b"):
            c.submit(submit(name), inbox)
        ended: dict[str, list[Any]] = {"a": [], "b": []}
        while not all(events and isinstance(events[-1], m.Finished) for events in ended.values()):
            for event in await inbox.take():
                ended[event.request_id].append(event)
        assert await inbox.take(timeout_s=0.01) == []
        await c.shutdown()

    run(test())


@pytest.mark.parametrize("bad", [{"top_k": 2**64}, {"stop_token_ids": (-(2**63) - 1,)}])
def test_a_request_that_cannot_be_sent_is_not_open(bad: dict[str, Any]) -> None:
    async def test() -> None:
        c = client(max_open=1)
        await c.start()
        for _ in range(3):
            with pytest.raises(OverflowError):
                c.submit(msgspec.structs.replace(submit("x"), sampling=SamplingParams(**bad)), Inbox())
        assert isinstance((await read(ask(c, "a")))[-1], m.Finished)
        await c.shutdown()

    run(test())


def test_open_requests_are_bounded() -> None:
    async def test() -> None:
        c = client("silent", max_open=2)
        await c.start()
        requests = [ask(c, str(i), "silent") for i in range(2)]
        with pytest.raises(EngineUnavailable) as caught:
            ask(c, "c", "silent")
        assert caught.value.status == 429
        requests[0].abort()
        requests.append(ask(c, "d", "silent"))
        assert (await c.stats())["running"] == 2
        for request in requests[1:]:
            request.abort()
        assert (await c.stats())["running"] == 0
        await c.shutdown()

    run(test())


def test_a_closed_inbox_ends_its_reader() -> None:
    async def test() -> None:
        c = client("silent")
        await c.start()
        request = ask(c, "a", "silent")
        reader = asyncio.create_task(read(request))
        await asyncio.sleep(0)  # now it waits
        request.inbox.close()
        assert await reader == []
        await c.shutdown()

    run(test())


def test_two_engines_in_one_process() -> None:
    async def test() -> None:
        one, two = client(), client()
        await asyncio.gather(one.start(), two.start())
        for c in (one, two):
            assert len(await read(ask(c, "same id"))) == 6
        await asyncio.gather(one.shutdown(), two.shutdown())

    run(test())


def test_start_up_adapters_that_are_wrong(tmp_path: Path) -> None:
    async def test() -> None:
        c = EngineClient(EngineConfig(model="tiny", adapters=["a=/x", f"b={tmp_path}/gone"]), command=COMMAND)
        with pytest.raises(UserError, match="gone: no such folder"):
            await c.start()
        assert c.state == "dead"
        await c.shutdown()

    run(test())
    for adapters, match in ((["a"], "write NAME=PATH"), (["=/x"], "write NAME=PATH"), (["a=/x", "a=/y"], "already")):
        with pytest.raises(UserError, match=match):
            EngineClient(EngineConfig(model="tiny", adapters=adapters), command=COMMAND)
    config = EngineConfig(model="tiny", adapters=["a=/x", "b=/y"], pinned_adapters=["b"])
    assert {name: call.pinned for name, call in startup_loads(config).items()} == {"a": False, "b": True}
    config.pinned_adapters = ["b", "c"]
    with pytest.raises(UserError, match="--pinned-adapters 'c': no adapter of --adapters; those are a, b"):
        startup_loads(config)


def test_a_restart_brings_back_what_there_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Start-up adapters and later ones, as they were replaced and unloaded; one whose folder has vanished is reported
    and is no reason to stay away."""

    async def test() -> None:
        folders = {name: tmp_path / name for name in "abcde"}
        for folder in folders.values():
            folder.mkdir()
        config = EngineConfig(model="tiny", adapters=[f"{name}={folders[name]}" for name in "abc"])
        c = EngineClient(config, command=COMMAND)
        await c.start()
        assert list(c.adapters) == ["a", "b", "c"]
        await c.load_adapter("d", str(folders["d"]))
        await c.load_adapter("b", str(folders["e"]), replace=True)
        await c.unload_adapter("c")
        folders["a"].rmdir()
        for deaths, left in enumerate((["b", "d"], ["a", "b", "d"]), 1):
            os.kill(c._link._process.pid, signal.SIGKILL)  # type: ignore[union-attr]
            await until(lambda deaths=deaths: c.restarts == deaths and c.state == "ready")
            assert {name: info.path for name, info in c.adapters.items()} == {
                name: str(folders["e" if name == "b" else name]) for name in left
            }
            assert caplog.text.count("adapter a could not be loaded again") == 1
            folders["a"].mkdir(exist_ok=True)  # the next restart finds it
        await c.shutdown()

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
            ask(c, "a")
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
        await c.shutdown()
        assert c.state == "stopped" and not c._dir.path.exists()

    monkeypatch.setenv("FAKE_ENGINE", '{"start_gate": "/nowhere"}')
    run(test())


def test_what_cannot_be_read_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        c = client("garbage", max_restarts=0)
        await c.start()
        with pytest.raises(EngineUnavailable, match="signal 9"):
            await read(ask(c, "a", "garbage"))
        await c.shutdown()

    run(test())


def test_a_stopped_engine_is_noticed_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clients' deadlines are the api's then; nothing is lost when it goes on."""

    async def test() -> None:
        c = client("slow")
        await c.start()
        pid = c._link._process.pid  # type: ignore[union-attr]
        stream = ask(c, "late", "slow", 400, timeout_s=0.5)
        os.kill(pid, signal.SIGSTOP)
        *_, last = await read(stream)
        assert isinstance(last, m.Cancelled) and last.reason == "timeout"
        await until(lambda: c.health == "silent")
        with pytest.raises(EngineUnavailable, match="silent"):
            ask(c, "b")
        with pytest.raises(EngineUnavailable, match="within"):
            await c.stats(timeout_s=0.3)
        os.kill(pid, signal.SIGCONT)
        await until(lambda: c.health == "ready")
        assert isinstance((await read(ask(c, "c")))[-1], m.Finished) and c.restarts == 0
        await c.shutdown(grace_s=0.2)

    monkeypatch.setattr(client_module, "_SILENT_S", 2.0)
    monkeypatch.setattr(client_module, "_LATE_S", 0.1)
    run(test())


@pytest.mark.parametrize("how", ["stopped", "hanging"])
def test_an_engine_that_hangs_is_replaced(how: str) -> None:
    async def test() -> None:
        c = client("hang", hang_s=2.0)
        await c.start()
        if how == "stopped":
            os.kill(c._link._process.pid, signal.SIGSTOP)  # type: ignore[union-attr]
        with pytest.raises(EngineUnavailable, match="signal 9"):
            await read(ask(c, "a", "hang"))
        await until(lambda: c.state == "ready")
        assert isinstance((await read(ask(c, "b")))[-1], m.Finished) and c.restarts >= 1
        await c.shutdown(grace_s=0.2)

    run(test())


def test_a_busy_engine_is_not_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many short steps take longer than one may."""
    monkeypatch.setattr(EngineClient, "_silent_s", lambda self: 0.0)  # a busy machine may stop it for that long

    async def test() -> None:
        c = client("slow", hang_s=2.0)
        await c.start()
        assert isinstance((await read(ask(c, "a", "slow", 60)))[-1], m.Finished) and c.restarts == 0
        await c.shutdown(grace_s=0.2)

    run(test())
