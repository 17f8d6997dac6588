"""An engine of several ranks ends as a whole: processes as they are served from, over gloo."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator

import pytest

from engine.messages import Ready
from engine.ranks.progress import Progress, Stage, Wait
from testing.processes import gone
from testing.waiting import eventually
from tests.parallel.engines import Engine


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


@pytest.mark.parametrize("idle", [True, False])
def test_a_rank_that_dies_ends_all(tmp_path, engines, idle):
    """The other one dies as it would if rank 0 were killed: nothing of the engine is left."""
    engines.append(Engine(tmp_path, 3, 60, 60))
    engines[0].until(Ready)
    _, first, second = engines[0].pids()
    if not idle:
        engines[0].submit()
    os.kill(first, signal.SIGKILL)
    status, said = engines[0].ended()
    assert status == 1 and "rank 1 of 3 has ended (signal 9)" in said and said.count(": the engine ends") == 1, said
    eventually(lambda: gone(second), "a rank is left")


@pytest.mark.parametrize(("late", "idle"), [(0, False), (1, True)])
def test_a_rank_that_is_stopped_ends_all(tmp_path, engines, late, idle):
    """Nothing of the engine is left; rank 0 is ended by another."""
    engines.append(Engine(tmp_path, 3, 6, 60))
    engines[0].until(Ready)
    ranks = engines[0].pids()
    if not idle:
        engines[0].submit()
    os.kill(ranks[late], signal.SIGSTOP)
    status, said = engines[0].ended()
    assert status == (1 if late else -signal.SIGKILL)
    assert f"engine: rank {late} of 3 has given no sign of life for 6 s (rank 0: serving, step " in said
    steps = [int(step) for step in re.findall(r"rank \d: serving, step (\d+), exchange \d+, ", said)]
    assert len(steps) == 3 and (max(steps) == 0 if idle else min(steps) > 1), said
    assert said.count("the engine ends") == 1
    eventually(lambda: all(map(gone, ranks)), "a rank is left")


@pytest.mark.parametrize(
    ("stage", "wait"),
    [
        (Stage.LOADING, Wait.NOTHING),
        (Stage.LOADING, Wait.STEP),
        (Stage.CONNECTING, Wait.EXCHANGE),
        (Stage.CONNECTING, Wait.STEP),
        (Stage.PREPARING, Wait.NOTHING),
    ],
)
def test_none_is_ready_before_all_are(tmp_path, engines, monkeypatch, stage, wait):
    """A rank that is paused on its way; the limits of a group that serves hold from then on."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    engines.append(Engine(tmp_path, 2, 60, 60))
    eventually(lambda: len(engines[0].pids()) == 2, "rank 1 is not started")
    rank, (file,) = engines[0].pids()[1], tmp_path.glob("ktserve-*/progress")
    progress = Progress.open(file, 0)

    def is_there() -> bool:
        place = progress.places()[1]
        return (place.stage, place.wait) == (stage, wait) or place.stage > stage

    eventually(is_there, "rank 1 does not get there", every_s=0.0)
    os.kill(rank, signal.SIGSTOP)
    later = threading.Timer(1.0, os.kill, (rank, signal.SIGCONT))
    later.start()
    engines[0].until(Ready)
    assert [place.stage for place in progress.places()] == [Stage.SERVING] * 2
    later.join()


def test_a_rank_that_stops_while_it_starts_ends_all(tmp_path, engines):
    engines.append(Engine(tmp_path, 2, 4, 8))
    eventually(lambda: len(engines[0].pids()) == 2, "rank 1 is not started")
    rank = engines[0].pids()[1]
    os.kill(rank, signal.SIGSTOP)
    status, said = engines[0].ended()
    assert status == 1 and "engine: rank 1 of 2 has given no sign of life for 8 s (rank 0: loading, " in said
    assert "rank 1: its process starts): the engine ends" in said
    eventually(lambda: gone(rank), "it is left")
