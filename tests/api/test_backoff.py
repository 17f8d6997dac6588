"""Sequences of engine deaths: how long each is answered with 503."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.client.backoff import Backoff
from api.client.client import EngineClient
from tests.api.test_client import ask, client, read, until

SERVED_S = st.floats(0, 3600)
ANSWERED = st.integers(0, 10_000)
DEATHS = st.lists(st.tuples(SERVED_S, ANSWERED), max_size=40)


def pid_of(c: EngineClient) -> int:
    return c._link._process.pid  # type: ignore[union-attr]


def after(deaths: list[tuple[float, int]]) -> Backoff:
    backoff = Backoff()
    for death in deaths:
        backoff.died(*death)
    return backoff


@given(st.lists(st.tuples(SERVED_S, st.integers(1, 10_000)), min_size=1, max_size=200))
def test_engines_that_answer_are_restarted_at_once(deaths: list[tuple[float, int]]) -> None:
    backoff = Backoff()
    assert {backoff.died(*death) for death in deaths} == {0.5}


@given(DEATHS, st.integers(1, 30))
def test_delays_grow_where_starts_fail(before: list[tuple[float, int]], failures: int) -> None:
    backoff = after(before)
    deaths = backoff.deaths
    delays = [backoff.died(0.0, 0) for _ in range(failures)]
    assert delays == [min(60.0, 0.5 * 2 ** (deaths + i)) for i in range(failures)]
    assert backoff.deaths == deaths + failures


@given(DEATHS, SERVED_S, ANSWERED, st.floats(0, 3600), ANSWERED)
def test_more_service_is_never_a_longer_delay(
    before: list[tuple[float, int]], served_s: float, answered: int, more_s: float, more: int
) -> None:
    less, longer = after(before), after(before)
    assert longer.died(served_s + more_s, answered + more) <= less.died(served_s, answered) <= 60.0
    assert longer.deaths <= less.deaths


@given(st.integers(0, 60))
def test_a_good_engine_ends_a_row_of_failed_starts(failures: int) -> None:
    backoff = after([(0.0, 0)] * failures)
    assert backoff.died(20.0, 100) == 0.5
    assert after([(0.0, 0)] * failures).died(30.0 * failures, 0) == 0.5


def test_deaths_after_service_are_not_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    """More of them than `max_restarts` allows in a row."""

    async def test() -> None:
        c = client(max_restarts=2)
        await c.start()
        for death in range(5):
            await until(lambda death=death: c.restarts == death and c.state == "ready")  # type: ignore[misc]
            await read(ask(c, f"request-{death}"))
            os.kill(pid_of(c), signal.SIGKILL)
        await until(lambda: c.restarts == 5 and c.state == "ready")
        assert c.backoff.deaths == 1 and [f"restart {n} in 0.5 s" in caplog.text for n in range(1, 6)] == [True] * 5
        for _ in range(2):  # two without service are all that is allowed
            assert not c.gave_up.is_set()
            pid = pid_of(c)
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: c.gave_up.is_set() or (c.state == "ready" and pid_of(c) != pid))  # type: ignore[misc]
        assert c.gave_up.is_set() and c.state == "dead"
        await c.shutdown()

    asyncio.run(asyncio.wait_for(test(), 120))
