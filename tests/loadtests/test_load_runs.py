"""The load test runs against a server that is up, starts one itself, spreads over workers, fails at its limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from testing.waiting import PATIENCE_S
from tests.api.conftest import ROOT, environment, model_dir, serving

__all__ = ["model_dir"]

SHORT = ("--duration", "1", "--max-tokens", "8", "--answer-tokens", "4", "--prompt-words", "4")


def load(*flags: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "loadtests.run", *SHORT, *flags],
        cwd=ROOT,
        env=env or {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    return done.returncode, done.stdout + done.stderr


def test_against_a_server(model_dir: Path, tmp_path: Path) -> None:
    flags = ["--adapters", "reverse=/x", "--adapters", "fail=/y"]
    flags += ["--api-key", "some=a:1:tiny,reverse", "--api-key", "all=b"]
    with serving(model_dir, tmp_path, *flags, key="all") as server:
        page = tmp_path / "page.html"
        chosen = ("--users", "2", "--host", server.url, "--api-key", "some", "--seed", "3")
        status, text = load(*chosen, "--report", str(page), "--workers", "1", "--limit", "ttft.p99/tiny=100000")
        assert status == 0, text
        for word in ("TTFT", "ITL", "answers", "tiny", "reverse", "tok/s"):
            assert word in text
        assert "All limits were kept" in (shown := page.read_text()) and shown.count("<svg") >= 6
        status, text = load("--users", "2", "--host", server.url, "--api-key", "all", "--scenario", "adapters")
        assert status == 1 and "a fault of the fake" in text and "missed: 2 users: errors is" in text
        status, text = load("--host", server.url)
        assert status == 1 and text.startswith(f"error: {server.url}: 401"), text


def test_it_starts_a_server_itself(model_dir: Path) -> None:
    flags = ("--scenario", "tenants", "--users", "3,6", "--limit", "tokens_s=1000000")
    status, text = load(*flags, "--", str(model_dir), env=environment())
    assert status == 1, text
    for word in ("serving tiny", "draining", "quiet", "heavy", "flood", "missed: 3 users: tokens_s", "missed: 6 users"):
        assert word in text
    assert "failed" in text and "errors is" not in text, text
    status, text = load("--", str(model_dir / "nope"), env=environment())
    assert status == 1 and "the server ended with status 1" in text


REFUSED = {
    "--rate: users of a closed run wait for answers; add --arrival poisson or bursts": "--rate 2",
    "--users 0: all must be above 0": "--users 0",
    "--users 2: tenants has 3 kinds of users": "--users 2 --scenario tenants",
    "--users: one number where arrivals are open": "--users 4,8 --arrival poisson",
    "'ttft=3' is no METRIC[/GROUP]=VALUE with one of ttft.pNN": "--limit ttft=3",
    "-1 must be at least 0": "--limit errors=-1",
    "--host names one that runs": "--host http://x --adapters 3",
    "--key quiet=KEY": "--host http://x --scenario tenants",
    "--adapter-path is needed": "--host http://x --scenario churn",
    "--duration nan: must be above 0": "--duration nan",
    "--adapters 65: 0 to 64": "--adapters 65",
    "--key quiet: write TENANT=KEY": "--key quiet",
}
TRY = """
import contextlib, io, json, sys
from loadtests.load.options import parse
said = {}
for line, flags in json.load(sys.stdin).items():
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.suppress(SystemExit):
        parse(flags.split())
    said[line] = err.getvalue()
print(json.dumps(said))
"""


def test_what_makes_no_sense_is_said() -> None:
    """In a process of its own: locust patches the standard library."""
    done = subprocess.run(
        [sys.executable, "-c", TRY], cwd=ROOT, input=json.dumps(REFUSED), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for line, said in json.loads(done.stdout).items():
        assert line in said, (line, said)
