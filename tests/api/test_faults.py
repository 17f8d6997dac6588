"""Clients that go away, engines that die, servers that are told to end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from api.config import ServeConfig
from api.http import server as server_module
from api.http.server import check_origins, listen, url_of
from engine.errors import UserError
from testing import forked
from testing.processes import engine_of, gone
from testing.waiting import PATIENCE_S, eventually
from tests.api.conftest import ROOT, Running, environment, serving


@contextlib.contextmanager
def asked(server: Running, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPConnection]:
    """A client that has sent its request and goes away at the end of the block."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE_S)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    try:
        yield connection
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_aborts_all_its_answers(server: Running, path: str, stream: bool) -> None:
    submits, aborts = len(server.received("Submit")), len(server.received("Abort"))
    body = {"model": "gated", "prompt": "abcd", "messages": [{"role": "user", "content": "abcd"}], "n": 2}
    body.pop("messages" if path == "/v1/completions" else "prompt")

    with asked(server, path, {**body, "stream": stream}) as connection:
        sent = {message["request_id"] for message in server.wait_for("Submit", submits + 2)[submits:]}
        if stream:
            assert connection.getresponse().readline().startswith(b"data: ")
    aborted = {message["request_id"] for message in server.wait_for("Abort", aborts + 2)[aborts:]}
    assert sent == aborted


def test_a_client_that_goes_away_while_it_waits_in_the_queue(server: Running) -> None:
    submits, aborts = len(server.received("Submit")), len(server.received("Abort"))
    with asked(server, "/v1/completions", {"model": "silent", "prompt": "a", "stream": True}):
        server.wait_for("Submit", submits + 1)
    server.wait_for("Abort", aborts + 1)


def test_one_refused_answer_aborts_its_siblings(server: Running) -> None:
    submits, aborts = len(server.received("Submit")), len(server.received("Abort"))
    with pytest.raises(openai.RateLimitError):
        server.openai.completions.create(model="refuse", prompt=["ab", "abcd"])  # the fake refuses the longer one
    waiting = server.wait_for("Submit", submits + 2)[submits]
    assert server.wait_for("Abort", aborts + 1)[aborts]["request_id"] == waiting["request_id"]


def test_the_engine_dies_and_comes_back(model_dir: Path, tmp_path: Path) -> None:
    adapters = ["--adapters", "die=/x", "--adapters", "gated=/y", "--adapters", "temporary=/z", "--admin-key", "admin"]
    adapters.append("--allow-any-adapter-path")
    gate = tmp_path / "gate"
    gate.touch()
    with serving(model_dir, tmp_path, *adapters, key="admin", start_gate=str(gate)) as server:
        gate.unlink()  # the next engine waits for it
        for name in ("late", "gated"):
            body = {"lora_name": name, "lora_path": str(tmp_path), "replace": True}
            assert server.http.post("/v1/load_lora_adapter", json=body).status_code == 200
        assert server.http.post("/v1/unload_lora_adapter", json={"lora_name": "temporary"}).status_code == 200
        stream = server.openai.completions.create(model="gated", prompt="abcd", stream=True)
        next(iter(stream))
        with pytest.raises(openai.InternalServerError) as caught:
            server.openai.completions.create(model="die", prompt="abcdef")
        assert caught.value.status_code == 503 and caught.value.code == "engine_unavailable"
        assert caught.value.response.headers["retry-after"]
        with pytest.raises(openai.APIError, match="the engine ended"):
            list(stream)
        health = server.http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "restarting"
        with pytest.raises(openai.InternalServerError, match="restarting"):
            server.openai.completions.create(model="tiny", prompt="a")
        gate.touch()
        eventually(lambda: server.http.get("/health").status_code == 200)
        assert server.http.get("/health").json()["restarts"] == 1
        names = {model.id for model in server.openai.models.list()}
        assert names == {"tiny", "die", "late", "gated"}, "what was loaded is again, what was unloaded stays away"
        assert server.openai.completions.create(model="late", prompt="ab").choices[0].text == "ab"
        assert "ktserve_engine_restarts 1.0" in server.http.get("/metrics").text


def test_adapters_that_are_loaded_again_are_not_unknown_meanwhile(model_dir: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    with serving(model_dir, tmp_path, "--adapters", "die=/x", "--adapters", "late=/y", load_gate=str(gate)) as server:
        gate.unlink()
        with pytest.raises(openai.InternalServerError):
            server.openai.completions.create(model="die", prompt="abcdef")
        server.wait_for("LoadAdapter", 3)  # the next engine has begun
        for name in ("die", "late", "tiny", "novel"):
            answer = server.http.post("/v1/completions", json={"model": name, "prompt": "a"})
            assert answer.status_code == 503 and answer.headers["retry-after"], answer.text
        assert {model.id for model in server.openai.models.list()} == {"tiny", "die", "late"}
        gate.touch()
        eventually(lambda: server.http.get("/health").status_code == 200)
        assert server.openai.completions.create(model="late", prompt="ab").choices[0].text == "ab"
        assert server.http.post("/v1/completions", json={"model": "novel", "prompt": "a"}).status_code == 404


def test_sigterm_drains(model_dir: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with serving(model_dir, tmp_path, "--adapters", "gated=/x", gate=str(gate)) as server:
        texts: list[str] = []

        def run() -> None:
            texts.append(
                server.openai.completions.create(model="gated", prompt="x" * 30, max_tokens=30).choices[0].text
            )

        thread = threading.Thread(target=run)
        thread.start()
        server.wait_for("Submit")
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.http.get("/health").json()["status"] == "draining")
        with pytest.raises(openai.InternalServerError) as caught:
            server.openai.completions.create(model="tiny", prompt="a")
        assert caught.value.status_code == 503
        gate.touch()
        thread.join(PATIENCE_S)
        assert texts == ["x" * 30]
        assert server.process.wait(PATIENCE_S) == 0


def test_a_drain_is_bounded_and_a_second_signal_ends_at_once(model_dir: Path, tmp_path: Path) -> None:
    flags = ["--adapters", "gated=/x", "--drain-timeout-s", "0.3"]
    with serving(model_dir, tmp_path, *flags) as server:
        stream = server.openai.completions.create(model="gated", prompt="abcd", stream=True)
        next(iter(stream))
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutdown"):
            list(stream)
        assert server.process.wait(PATIENCE_S) == 0


def test_no_orphan_when_the_api_is_killed(model_dir: Path, tmp_path: Path) -> None:
    with serving(model_dir, tmp_path) as server:
        engine = engine_of(server.process.pid)
        assert engine.is_running()
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(PATIENCE_S)
        eventually(lambda: gone(engine.pid))


def test_the_socket_is_private_and_removed(model_dir: Path, tmp_path: Path) -> None:
    with serving(model_dir, tmp_path) as server:
        address = next(part for part in engine_of(server.process.pid).cmdline() if part.startswith("ipc://"))
        folder = Path(address.removeprefix("ipc://")).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert server.stop() == 0
        assert not folder.exists()


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_giving_up_while_the_model_loads(model_dir: Path, sent: int, status: int) -> None:
    tmp_path = Path(tempfile.mkdtemp(prefix="kt"))  # short enough for a socket
    argv = [sys.executable, "-m", "api.cli.main", "serve", str(model_dir), "--port", "0"]
    env = {**environment(start_gate="/nowhere"), "TMPDIR": str(tmp_path)}
    # A job in the background of a script inherits an ignored SIGINT.
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(argv, env=env, cwd=ROOT, stderr=subprocess.PIPE)
    signal.signal(signal.SIGINT, heard)
    try:
        eventually(lambda: any(tmp_path.glob("ktserve-*/engine-0")))
        children = psutil.Process(process.pid).children()
        process.send_signal(sent)
        assert process.wait(PATIENCE_S) == status
        assert process.stderr is not None and b"Traceback" not in process.stderr.read()
        tmp_path.rmdir()  # it is empty again
        assert children and all(gone(child.pid) for child in children)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_commands_child_ends_with_it(model_dir: Path, sent: int) -> None:
    child = f"{sys.executable} -c 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'"
    argv = [sys.executable, "-m", "api.cli.main", "plan", str(model_dir)]
    env = {**environment(), "KTSERVE_ENGINE_COMMAND": child}
    with subprocess.Popen(argv, env=env, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        started = int(process.stdout.readline())
        process.send_signal(sent)
        assert process.wait(PATIENCE_S) == -sent
        eventually(lambda: gone(started))


@pytest.mark.parametrize(("command", "module"), [("serve", "uvloop"), ("plan", "rich"), ("check", "torch")])
def test_ctrl_c_during_an_import_is_no_traceback(model_dir: Path, tmp_path: Path, command: str, module: str) -> None:
    """`torch` is imported by the child."""
    (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt")
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    del env["KTSERVE_ENGINE_COMMAND"]
    argv = [sys.executable, str(ROOT / "ktserve" / "__main__.py"), command, str(model_dir)]
    done = subprocess.run(argv, env=env, cwd=ROOT, stderr=subprocess.PIPE, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (130, b"")


def test_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1", "0") as first:
        taken = first.getsockname()[1]
        first.listen()
        monkeypatch.setattr(server_module, "DEFAULT_PORT", taken)
        with listen("127.0.0.1", "auto") as second:
            assert second.getsockname()[1] != taken
            assert url_of(second) == f"http://127.0.0.1:{second.getsockname()[1]}"
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{taken}"):
            listen("127.0.0.1", str(taken))
    with listen("127.0.0.1", "auto") as third:
        assert third.getsockname()[1] == taken
    for port in ("0", "auto"):  # another port would not help
        for host in ("no.such.host.invalid", "192.0.2.1"):
            with pytest.raises(UserError, match=f"^--host {re.escape(host)}: cannot listen there: [A-Z]"):
                listen(host, port)
    with pytest.raises(UserError, match="Kubernetes"):
        listen("127.0.0.1", "tcp://10.0.0.1:8000")


@pytest.mark.parametrize("origin", ["*", "null", "https://example.com", "http://[::1]:3000", "tauri://localhost"])
@pytest.mark.parametrize("wrong", ["{}/", "{}/app", "X{}", "{} ", "{}?"])
def test_origins_that_no_browser_sends_are_refused(origin: str, wrong: str) -> None:
    check_origins(ServeConfig(cors_origins=[origin]))
    with pytest.raises(UserError, match="--cors-origins"):
        check_origins(ServeConfig(cors_origins=[origin, wrong.format(origin)]))


def test_a_mistake_of_the_users_is_one_line(model_dir: Path, tmp_path: Path) -> None:
    def run(*flags: str, **fake: str) -> tuple[int, str]:
        done = forked.run("api.cli.main", ["serve", *flags], environment(**fake), timeout=PATIENCE_S)
        return done.returncode, done.stderr

    for flags, fake, part in (
        ([str(model_dir)], {"fatal": "the model does not fit"}, "the model does not fit"),
        ([str(tmp_path / "nope")], {}, "no such file"),
        ([str(model_dir), "--engine-command", "/nowhere/engine"], {}, "/nowhere/engine"),
        ([str(model_dir), "--port", "99999"], {}, "--port 99999"),
        ([str(model_dir), "--api-key", "="], {}, "--api-key number 1"),
    ):
        status, stderr = run(*flags, **fake)
        assert status == 1, stderr
        assert part in stderr.splitlines()[-1] and stderr.splitlines()[-1].startswith("error: ")
        assert "Traceback" not in stderr
