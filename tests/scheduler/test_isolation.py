"""The scheduler alone: without torch, without a clock, and the same under every hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from testing.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return done.stdout


def test_it_imports_neither_torch_nor_the_engine() -> None:
    code = """
import pkgutil, sys, scheduler
for module in pkgutil.iter_modules(scheduler.__path__):
    __import__(f"scheduler.{module.name}")
print([name for name in ("torch", "transformers", "numpy", "engine", "api") if name in sys.modules])
"""
    assert python(code).strip() == "[]"


def test_no_clock_and_no_chance_inside() -> None:
    for path in (ROOT / "scheduler").glob("*.py"):
        text = path.read_text()
        for word in ("import time", "from time", "import random", "from random", "datetime"):
            assert word not in text, f"{path.name}: {word}"


def test_decisions_do_not_depend_on_the_hash_seed() -> None:
    code = """
import zlib
from tests.scheduler.test_random_runs import run
print([zlib.crc32(repr(run(seed, depth).trace).encode()) for seed in range(4) for depth in (0, 1)])
"""
    outputs = {python(code, PYTHONHASHSEED=seed) for seed in ("0", "1", "12345")}
    assert len(outputs) == 1
