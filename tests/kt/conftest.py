"""kt_kernel allows one pool a process, so every case runs in a process of its own, once, and tests read its answer."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.experts.kt.backend import kt_available
from testing import forked
from testing.waiting import PATIENCE_S

IMPORTED = ("tests.kt.worker", "benchmarks.accuracy.table")
Worker = Callable[..., Any]
CPU_HAS_AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else False


def _installable() -> bool:
    """Where kt_kernel's wheel installs it must load; only elsewhere may these tests be skipped."""
    import platform

    libc, version = platform.libc_ver()
    return (
        sys.platform == "linux"
        and platform.machine() == "x86_64"
        and libc == "glibc"
        and tuple(int(part) for part in version.split(".")[:2]) >= (2, 35)
        and (3, 11) <= sys.version_info[:2] <= (3, 12)
    )


@pytest.fixture(scope="session")
def worker() -> Worker:
    ready, why = kt_available()
    if not ready:
        if not _installable():
            pytest.skip(f"kt_kernel cannot be installed here: {why}")
        pytest.fail(f"kt_kernel must load on this machine: {why}")
    answers: dict[str, Any] = {}
    missing: dict[str, str] = {}  # why this CPU cannot run a case

    def run(case: str, variant: str | None = None, **arguments: Any) -> Any:
        key = json.dumps([case, variant, arguments], sort_keys=True)
        if key in missing:
            pytest.skip(missing[key])
        if key not in answers:
            environment = dict(os.environ)
            if variant:
                environment["KT_KERNEL_CPU_VARIANT"] = variant
            done = forked.run(
                "tests.kt.worker", [case, json.dumps(arguments)], environment, timeout=PATIENCE_S, imported=IMPORTED
            )
            if not CPU_HAS_AVX512 and (why := re.search(r"kt_method \w+: not on this CPU.*", done.stderr)):
                missing[key] = why[0]
                pytest.skip(missing[key])
            assert done.returncode == 0, f"{case} ended with {done.returncode}: {done.stderr[-3000:]}"
            assert "CPUInfer" not in done.stdout, "kt_kernel's chatter reached stdout"
            answers[key] = json.loads(done.stdout)
        return answers[key]

    return run
