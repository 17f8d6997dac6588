"""kill -9 at any moment, of the server or of its engine: a job ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from pathlib import Path

import pytest

from testing.processes import engine_of, kill_all
from testing.waiting import eventually
from tests.e2e.conftest import serving
from tests.tuning.test_jobs import KEYS, Tenant, supervised, talks


def losses(team: Tenant, job_id: str) -> dict[int, float]:
    events = [each.data for each in team.events(job_id) if each.type == "metrics"]
    found = {each["step"]: each["train_loss"] for each in events}
    assert len(found) == len(events), "a step that was computed again is there twice"
    return found


class Killed(Exception):
    """The server is gone, which `serving` is not to complain of."""


def kill_behind_step(team: Tenant, job_id: str, step: int, delay_s: float) -> None:
    eventually(lambda: len(team.steps(job_id)) >= step)
    time.sleep(delay_s)  # anywhere between two events
    kill_all(team.server.process)
    raise Killed


def test_a_job_outlives_kills_of_the_server_and_of_its_engine(tmp_path: Path):
    """Its losses are those of a job that nobody has disturbed, each step once."""
    rng = random.Random(5)
    flags = ["--fine-tuning", "--data-dir", str(tmp_path / "data"), "--pack-cache", "off", *KEYS]
    method = supervised(n_epochs=12, batch_size=2, learning_rate_multiplier=2.0)
    with contextlib.suppress(Killed), serving(tmp_path, *flags) as server:
        team = Tenant(server, "key-a")
        whole = team.create(talks(4), method=method)
        assert team.ended(whole).status == "succeeded"
        wanted = losses(team, whole)
        job_id = team.create(talks(4), method=method)
        kill_behind_step(team, job_id, 5, rng.random() * 0.1)
    with contextlib.suppress(Killed), serving(tmp_path, *flags) as server:
        kill_behind_step(Tenant(server, "key-a"), job_id, 20, rng.random() * 0.1)  # where states have been written
    with serving(tmp_path, *flags) as server:
        team = Tenant(server, "key-a")
        eventually(lambda: team.steps(job_id))
        engine_of(server.process.pid).send_signal(signal.SIGKILL)
        job = team.ended(job_id)
        assert job.status == "succeeded", team.events(job_id)
        found = losses(team, job_id)
        assert sorted(found) == list(range(1, 25))
        for step, loss in wanted.items():
            assert found[step] == pytest.approx(loss, rel=1e-3, abs=1e-4), step
        assert job.fine_tuned_model in team.models()
        assert team.ask(job.fine_tuned_model, "What does the bell say, number 1?")
        left = {path.name.split("-")[0] for path in (tmp_path / "data" / "tuning" / job_id).iterdir()}
        assert left == {"adapter"}
