"""How much memory this process may still take. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from native.cgroup import group_folders, read_text

_NO_LIMIT = 1 << 60  # v1 writes a number near 2^63 where there is none
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@dataclass(frozen=True)
class Memory:
    """One device's memory in bytes. `limit_bytes` is the smaller of what exists and what is allowed."""

    name: str  # "CPU", "GPU 0"
    free_bytes: int
    limit_bytes: int


def cpu_memory(root: Path = Path("/")) -> Memory:
    """The machine's memory within the limits of the control groups (v1 and v2) that this process is in.

    Page cache counts as free: the kernel gives it up. `root` is where /proc and /sys are looked for.
    """
    machine = psutil.virtual_memory()
    free, limit = int(machine.available), int(machine.total)
    for allowed, used in _groups(root):
        free, limit = min(free, max(allowed - used, 0)), min(limit, allowed)
    return Memory("CPU", free, limit)


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of each group with a limit, from ours up to the root."""
    for folder, v2 in group_folders("memory", root):
        limit_file, usage_file, cache_key = _V2 if v2 else _V1
        limit, usage = read_text(folder / limit_file).strip(), read_text(folder / usage_file).strip()
        if not limit.isdigit() or not usage.isdigit() or int(limit) >= _NO_LIMIT:
            continue
        stat = dict(line.split(" ", 1) for line in read_text(folder / "memory.stat").splitlines() if " " in line)
        cache = stat.get(cache_key, "0").strip()
        yield int(limit), max(int(usage) - (int(cache) if cache.isdigit() else 0), 0)
