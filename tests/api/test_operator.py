"""What an operator meets: a port that is taken, an engine that keeps dying, limits that are too low, leftovers."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import openai
import pytest

from api.client import process
from api.client.process import SocketDir
from engine.heartbeat import Heartbeat
from testing.processes import engine_of, gone
from testing.waiting import PATIENCE_S, eventually
from tests.api.conftest import ROOT, environment, serving

SERVE = (sys.executable, "-m", "api.cli.main", "serve")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(*flags: str, tmpdir: Path | None = None, **fake: object) -> Iterator[subprocess.Popen[str]]:
    """A server that may be still loading."""
    env = {**environment(**fake), **({"TMPDIR": str(tmpdir)} if tmpdir else {})}
    process = subprocess.Popen([*SERVE, *flags], env=env, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def health(port: int) -> dict[str, object] | None:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").json()
    except httpx.TransportError:
        return None


def test_the_port_answers_while_the_model_loads(model_dir: Path) -> None:
    port = free_port()
    with started(str(model_dir), "--port", str(port), start_gate="/nowhere") as process:
        seen: list[dict[str, object]] = []

        def loading() -> bool:
            if answer := health(port):
                seen.append(answer)
            return bool(seen) and "loading" in seen[-1]

        eventually(loading, 40)
        assert seen[-1]["status"] == "loading" and seen[-1]["loading"]["total"] == 3  # type: ignore[index]
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"model": "tiny", "prompt": "a"})
        assert answer.status_code == 503 and "loading" in answer.json()["error"]["message"]
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 503
        second = subprocess.run(
            [*SERVE, str(model_dir), "--port", str(port)],
            env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert second.returncode == 1 and "cannot listen on" in second.stderr.splitlines()[-1]
        assert "Traceback" not in second.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 143
        assert process.stderr is not None and "Traceback" not in process.stderr.read()


def test_an_engine_that_keeps_dying_is_started_again_or_ends_the_server(model_dir: Path, tmp_path: Path) -> None:
    def die(server) -> None:
        eventually(lambda: server.http.get("/health").status_code == 200)
        with pytest.raises(openai.APIError):
            server.openai.completions.create(model="die", prompt="abcdef")

    with serving(model_dir, tmp_path, "--adapters", "die=/x", "--max-restarts", "1") as server:
        for _ in range(2):
            die(server)
        assert server.process.wait(PATIENCE_S) == 1, "a server without an engine does not live on"
        assert "--max-restarts" in server.stderr
    with serving(model_dir, tmp_path, "--adapters", "die=/x") as server:
        for _ in range(4):
            die(server)
        eventually(lambda: server.http.get("/health").json() == {"status": "ready", "restarts": 4}, 40)
        assert server.stop() == 0


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """pytest's folders may be too long for a socket in them."""
    with tempfile.TemporaryDirectory(prefix="kt", dir="/tmp") as made:
        yield Path(made)


def test_what_a_killed_server_left_is_removed(short_folder: Path) -> None:
    base = short_folder
    code = "import os, signal; from api.client.process import SocketDir; print(SocketDir().path, flush=True); "
    env = {**environment(), "TMPDIR": str(base)}

    def leave(rest: str) -> subprocess.Popen[str]:
        made = subprocess.Popen([sys.executable, "-c", code + rest], env=env, stdout=subprocess.PIPE, text=True)
        assert made.stdout is not None and Path(made.stdout.readline().strip()).parent == base
        return made

    alive = leave("signal.pause()")
    killed = leave("os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.wait(30) == -signal.SIGKILL
    foreign = base / "ktserve-of-something-else"
    foreign.mkdir()
    assert len(list(base.glob("ktserve-*"))) == 3
    third = leave("signal.pause()")
    try:
        assert len(list(base.glob("ktserve-*"))) == 3, "the killed one's is gone, the others' are not"
        assert foreign.exists()
    finally:
        for process in (alive, third):
            process.kill()
            process.wait()


def test_the_folder_goes_with_its_owner() -> None:
    made = SocketDir()
    again = SocketDir()
    assert made.path.exists() and again.path.exists()
    for each in (made, again):
        each.remove()
        assert not each.path.exists()


@pytest.mark.parametrize(
    ("limit", "value", "message"), [("NOFILE", 64, "64 files.*256"), ("AS", 1 << 30, "1024 MiB.*2048")]
)
def test_limits_that_are_too_low_are_one_line(model_dir: Path, limit: str, value: int, message: str) -> None:
    limited = (
        f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_{limit}, ({value}, {value})); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, *SERVE, str(model_dir), "--port", "0"],
        env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and re.search(f"error: .*{message}", done.stderr.splitlines()[-1])


def test_a_silent_engine_shows_within_five_seconds(model_dir: Path, tmp_path: Path) -> None:
    with serving(model_dir, tmp_path, "--engine-hang-s", "9") as server:
        engine = engine_of(server.process.pid)
        engine.suspend()
        asked = [time.monotonic()]

        def silent() -> bool:
            asked.append(time.monotonic())
            return server.http.get("/health").status_code == 503

        eventually(silent, PATIENCE_S)
        asked.append(time.monotonic())
        stall = max(b - a for a, b in pairwise(asked))  # of a busy machine, between two questions
        assert asked[-1] - asked[0] - stall < 5 + 1, "4 s, and what the two processes take to see it"
        eventually(lambda: gone(engine.pid), 30)
        eventually(lambda: server.http.get("/health").status_code == 200, 40)
        assert server.openai.completions.create(model="tiny", prompt="ab").choices[0].text == "ab"


def test_a_start_beside_another_does_not_remove_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that looks for leftovers just when the other has made its lock, and not taken it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    flock, removed = process.fcntl.flock, []

    def late(file: int, how: int) -> None:
        if not removed:
            removed.append(next(tmp_path.glob("ktserve-*")))
            process._remove_if_left(removed[0])
        flock(file, how)

    monkeypatch.setattr(process.fcntl, "flock", late)
    made = SocketDir()
    assert made.path.exists() and made.path not in removed
    made.remove()


def test_an_engine_that_was_slow_to_start_is_not_silent(tmp_path: Path) -> None:
    made = Heartbeat.create(tmp_path / "beat")
    made._words[0] -= 10**10
    assert made.silent_s() > 9
    engine = Heartbeat(tmp_path / "beat")
    engine.start()
    assert made.silent_s() < 9
    engine.stop()


@pytest.mark.parametrize("flags", [[], ["--api-key", "k=a"]])
def test_sighup_without_files_ends_nothing(model_dir: Path, tmp_path: Path, flags: list[str]) -> None:
    """Whatever is in flight: a terminal that is closed, or an operator's `kill -HUP` by habit."""
    gate = tmp_path / "gate"
    with serving(model_dir, tmp_path, "--adapters", "gated=/x", *flags, key="k", gate=str(gate)) as server:
        body = {"model": "gated", "prompt": "abc", "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            assert next(lines)
            for number in range(1, 4):
                server.process.send_signal(signal.SIGHUP)
                eventually(lambda n=number: server.stderr.count("SIGHUP") == n)  # type: ignore[misc]
            gate.touch()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.http.get("/health").json()["restarts"] == 0
        assert server.stop() == 0
