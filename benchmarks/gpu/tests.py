"""Runs the tests that need an NVIDIA GPU and records how they ended: make test-gpu.

python -m benchmarks.gpu.tests [--processes 10] [--out FILE]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import record

ROOT = Path(__file__).parents[2]
TESTS = ("tests/gpu", "tests/bridge")


def run(tests: Sequence[str], processes: int, out: Path) -> int:
    """pytest's exit status. The record has the numbers of tests, the names of those that failed, and the time."""
    with tempfile.TemporaryDirectory(prefix="ktserve-gpu-tests-") as folder:
        report = Path(folder) / "report.xml"
        words = [sys.executable, "-m", "pytest", *tests, "-n", str(processes), f"--junitxml={report}"]
        status = subprocess.run(words, cwd=ROOT, check=False).returncode
        if report.exists():
            record.write(out, {"torch": torch.__version__, **outcome(report)})
    return status


def outcome(report: Path) -> dict[str, Any]:
    """Of a JUnit report."""
    suite = next(ElementTree.parse(report).iter("testsuite"))
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "skipped", "failures", "errors")}
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    passed = counts.pop("tests") - sum(counts.values())
    return {"passed": passed, **counts, "failed": failed, "seconds": round(float(suite.get("time", "0")))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=min(10, len(os.sched_getaffinity(0))))
    parser.add_argument("--out", type=Path, default=record.RESULTS / "gpu-tests.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(f"no NVIDIA GPU that this torch ({torch.__version__}) can use: see nvidia-smi")
    raise SystemExit(run(TESTS, args.processes, args.out))


if __name__ == "__main__":
    main()
