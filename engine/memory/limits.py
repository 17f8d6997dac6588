"""How much memory this process may still take. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_NO_LIMIT = 1 << 60  # v1 writes a number near 2^63 where there is none


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
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            yield from _walk(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _walk(root / "sys/fs/cgroup/memory", path, *names)


def _walk(mount: Path, path: str, limit_file: str, usage_file: str, cache_key: str) -> Iterator[tuple[int, int]]:
    """Inside a container the path may be one of the host, not below the mount: its missing levels say nothing."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:depth])
        limit, usage = _read(folder / limit_file).strip(), _read(folder / usage_file).strip()
        if not limit.isdigit() or not usage.isdigit() or int(limit) >= _NO_LIMIT:
            continue
        stat = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
        cache = stat.get(cache_key, "0").strip()
        yield int(limit), max(int(usage) - (int(cache) if cache.isdigit() else 0), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
