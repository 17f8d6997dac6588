"""The files for nginx and Caddy, with this test's ports in place of theirs, in front of a server with --root-path."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from testing.waiting import PATIENCE_S, eventually
from tests.api.conftest import Running, serving

DEPLOY = Path(__file__).parents[2] / "deploy"
ROOT = "/llm"


@pytest.fixture(scope="module")
def behind(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("behind")
    flags = ("--root-path", ROOT, "--adapters", "gated=/fake/gated")
    with serving(model_dir, folder, *flags, gate=str(folder / "gate")) as server:
        yield server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def nginx(folder: Path, port: int, to: str) -> list[str]:
    """Its command for the server block of deploy/, without the certificate that is not there."""
    text = (DEPLOY / "nginx.conf").read_text()
    lines = [line for line in text.splitlines() if "ssl_certificate" not in line]
    block = "\n".join(lines).replace("listen 443 ssl;", f"listen 127.0.0.1:{port};").replace("127.0.0.1:8000", to)
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log stderr; events {{}}\nhttp {{ access_log off;\n"
        + "".join(
            f"{name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        + f"{block}\n}}"
    )
    return ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]


def caddy(folder: Path, port: int, to: str) -> list[str]:
    text = (DEPLOY / "Caddyfile").read_text()
    text = text.replace("llm.example.com", f"http://127.0.0.1:{port}").replace("127.0.0.1:8000", to)
    (folder / "Caddyfile").write_text(f"{{\n\tadmin off\n}}\n{text}")
    return ["caddy", "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


@pytest.fixture(params=[nginx, caddy], ids=lambda made: made.__name__)
def proxy(request: pytest.FixtureRequest, behind: Running, tmp_path: Path) -> Iterator[str]:
    """Its URL."""
    if shutil.which(request.param.__name__) is None:
        pytest.skip(f"{request.param.__name__} is not installed")
    port = free_port()
    command = request.param(tmp_path, port, behind.url.removeprefix("http://"))
    process = subprocess.Popen(command, env={"HOME": str(tmp_path), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})

    def answers() -> bool:
        assert process.poll() is None
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    try:
        eventually(answers, "the proxy did not start")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def test_pages_answers_and_errors_come_through(proxy: str) -> None:
    with httpx.Client(base_url=proxy + ROOT, timeout=PATIENCE_S) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert client.get("/").status_code == 200 and client.get("/page/app.js").status_code == 200
        assert client.post("/v1/completions", json={"model": "nope", "prompt": "a"}).status_code == 404
        assert client.post("/v1/completions", json={"model": "tiny", "prompt": "abc" * 400_000}).status_code == 400


@pytest.mark.parametrize(
    ("path", "more", "kind"),
    [("/v1/completions", {}, "text/event-stream"), ("/api/generate", {"raw": True}, "application/x-ndjson")],
    ids=["events", "lines"],
)
def test_tokens_are_sent_on_as_they_come(
    path: str, more: dict[str, bool], kind: str, proxy: str, behind: Running
) -> None:
    """The last token comes when the client has read those before it: a proxy that holds an answer back never ends."""
    gate = behind.log.with_name("gate")
    gate.unlink(missing_ok=True)
    body = {"model": "gated", "prompt": "hello world", "stream": True, **more}
    with httpx.stream("POST", f"{proxy}{ROOT}{path}", json=body, timeout=PATIENCE_S) as answer:
        assert answer.headers["content-type"].startswith(kind)
        lines = (line for line in answer.iter_lines() if line)
        first = json.loads(next(lines).removeprefix("data: "))
        text = first["response"] if more else first["choices"][0]["text"]
        assert text and "hello world".startswith(text)
        gate.touch()
        last = list(lines)[-1]
    assert json.loads(last)["done"] if more else last == "data: [DONE]"


def test_who_hangs_up_behind_a_proxy_ends_the_request(proxy: str, behind: Running) -> None:
    behind.log.with_name("gate").unlink(missing_ok=True)
    aborts = len(behind.received("Abort"))
    body = {"model": "gated", "prompt": "hello world", "stream": True}
    with httpx.stream("POST", f"{proxy}{ROOT}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        next(answer.iter_lines())
    behind.wait_for("Abort", aborts + 1)
