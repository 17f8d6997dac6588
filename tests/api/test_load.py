"""The load test runs against a server that is up, and starts one itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from testing.waiting import PATIENCE_S
from tests.api.conftest import ROOT, environment, serving


def load(*flags: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "loadtests.run", "--users", "2", "--duration", "1", "--max-tokens", "8", *flags],
        cwd=ROOT,
        env=env or {**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    return done.returncode, done.stdout + done.stderr


def test_against_a_server(model_dir: Path, tmp_path: Path) -> None:
    flags = ["--adapters", "reverse=/x", "--adapters", "fail=/y"]
    flags += ["--api-key", "some=a:1:tiny,reverse", "--api-key", "all=b"]
    with serving(model_dir, tmp_path, *flags, key="all") as server:
        status, text = load("--host", server.url, "--api-key", "some")
        assert status == 0, text
        for word in ("TTFT", "ITL", "chat", "tiny", "reverse", "tokens/s"):
            assert word in text
        status, text = load("--host", server.url, "--api-key", "all")
        assert status == 1 and "a fault of the fake" in text
        status, text = load("--host", server.url)
        assert status == 1 and text.startswith(f"error: {server.url}: 401"), text


def test_it_starts_a_server_itself(model_dir: Path) -> None:
    status, text = load("--", str(model_dir), env=environment())
    assert status == 0, text
    assert "serving tiny" in text and "draining" in text
    status, text = load("--", str(model_dir / "nope"), env=environment())
    assert status == 1 and "the server ended with status 1" in text
