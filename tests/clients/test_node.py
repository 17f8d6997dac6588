"""Clients of JavaScript, in tests of their own (tests/clients/node)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.asked import needs

needs()

from testing.waiting import PATIENCE_S
from tests.e2e.conftest import Server

NODE = Path(__file__).parent / "node"


@pytest.mark.parametrize("name", ["openai", "ai"])
def test_in_node(demo: Server, name: str) -> None:
    node = shutil.which("node")
    if node is None or not (NODE / "node_modules").is_dir():
        pytest.skip("Node.js or its packages are not installed (make test-clients)")
    done = subprocess.run(
        [node, "--test", f"{name}.test.mjs"],
        cwd=NODE,
        env={**os.environ, "KTSERVE_URL": demo.url},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
