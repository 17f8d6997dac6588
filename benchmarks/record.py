"""What every file in benchmarks/results begins with: where its figures come from.

`commit` and `dirty` are git's. Where the run has no git (a copy of the tree on another machine), give them as
`BENCH_COMMIT=$(git describe --always --dirty --exclude '*')`.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
KEYS = ("commit", "dirty", "date", "hardware", "command")
NOT_RECORDED = "not recorded"  # as `dirty` of results that are older than this module
_SHOWN = ("KTSERVE_ISA", "OMP_NUM_THREADS")  # of the environment, before the command


def write(path: Path, results: Mapping[str, Any]) -> None:
    """`results` behind where they come from, as JSON; a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({**origin(), **results}, indent=1) + "\n")
    part.replace(path)


@functools.cache
def origin() -> dict[str, Any]:
    """The values of KEYS for this process: the tree as it was when first asked."""
    commit, dirty = _commit()
    return {
        "commit": commit,
        "dirty": dirty,
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "command": command(),
    }


def _commit() -> tuple[str, bool | str]:
    """`unknown` without git and BENCH_COMMIT. Results and pages that a run rewrites do not count as changes."""
    if given := os.environ.get("BENCH_COMMIT"):
        return given.removesuffix("-dirty"), given.endswith("-dirty")
    head = _git("rev-parse", "--short", "HEAD")
    if not head:
        return "unknown", NOT_RECORDED
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!docs")
    return head, bool(changed)


def _git(*words: str) -> str:
    folder = Path(__file__).parents[1]
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def hardware() -> str:
    """CPU, GPUs and memory of this machine, on one line."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in info if line.startswith("model name")), "unknown CPU")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    parts = [f"{model}, {len(os.sched_getaffinity(0))} CPUs", f"{memory / 1e9:.0f} GB"]
    return ", ".join([*_gpus(), *parts])


def _gpus() -> list[str]:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False
        )
    except OSError:
        return []
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def command() -> str:
    """As it was typed, without this machine's folders."""
    shown = [f"{name}={os.environ[name]}" for name in _SHOWN if name in os.environ]
    return " ".join([*shown, "python", shlex.join(without_folders(sys.orig_argv[1:]))])


def without_folders(words: Sequence[str]) -> list[str]:
    return [Path(word).name if word.startswith("/") else word for word in words]
