"""The CPUs this process may use, by NUMA node, and the worker pool made from them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from native.cgroup import group_folders, read_text

if TYPE_CHECKING:
    from native import _native

PIN_ABOVE_CPUS = 4  # with fewer, a pinned worker that loses its CPU to another process stalls the rest
SPARE_ABOVE_CPUS = 4  # with more, two CPUs stay free for the server's other threads
SPARE_CPUS = 2


def cpu_quota(root: Path = Path("/")) -> int | None:
    """Whole CPUs that the cgroup grants (v2 `cpu.max` or v1 `cpu.cfs_quota_us`, the least up the tree), or None."""
    limits = [limit for folder, v2 in group_folders("cpu", root) if (limit := _limit(folder, v2)) is not None]
    return max(1, int(min(limits))) if limits else None


def _limit(folder: Path, v2: bool) -> float | None:
    """CPUs; None: no limit is there."""
    names = ("cpu.max",) if v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    words = " ".join(read_text(folder / name) for name in names).split()
    if len(words) != 2 or words[0] in ("max", "-1"):
        return None
    return int(words[0]) / int(words[1])


def node_cpus(root: Path = Path("/")) -> dict[int, set[int]]:
    """All CPUs by the system's number of their NUMA node; empty where the machine does not say."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    return {int(folder.name[4:]): set(parse_cpu_list((folder / "cpulist").read_text())) for folder in folders}


def numa_nodes(cpus: list[int], root: Path = Path("/")) -> list[list[int]]:
    """`cpus` by NUMA node; one node if the machine does not say."""
    nodes = [[cpu for cpu in cpus if cpu in there] for _, there in sorted(node_cpus(root).items())]
    return [node for node in nodes if node] if sum(map(len, nodes)) == len(cpus) else [cpus]


def parse_cpu_list(text: str) -> list[int]:
    """ "0-3,8" -> [0, 1, 2, 3, 8]"""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


def pool_groups(threads: int | None = None, cpus: list[int] | None = None, root: Path = Path("/")) -> list[list[int]]:
    """CPUs per NUMA node for a pool of `threads` workers (default: what affinity and cgroup grant, less two where
    there are more than four). More threads than CPUs share them. ValueError for less than one thread."""
    cpus = sorted(os.sched_getaffinity(0)) if cpus is None else cpus
    quota = cpu_quota(root)
    granted = min(len(cpus), quota or len(cpus))
    if threads is None:
        threads = granted - SPARE_CPUS if granted > SPARE_ABOVE_CPUS else granted
    if threads < 1:
        raise ValueError(f"threads: {threads}; at least 1")
    nodes = numa_nodes(cpus, root)
    # Node by node in turn, so that fewer threads than CPUs still read every node's memory.
    order = [(n, node[i]) for i in range(max(map(len, nodes))) for n, node in enumerate(nodes) if i < len(node)]
    groups: list[list[int]] = [[] for _ in nodes]
    for i in range(threads):
        n, cpu = order[i % len(order)]
        groups[n].append(cpu)
    return [group for group in groups if group]


def group_nodes(groups: list[list[int]], root: Path = Path("/")) -> list[int]:
    """The system's number of each group's NUMA node; -1 where the machine does not say."""
    number = {cpu: node for node, cpus in node_cpus(root).items() for cpu in cpus}
    return [number.get(group[0], -1) for group in groups]


def spare_cpus(threads: int | None = None, cpus: list[int] | None = None, root: Path = Path("/")) -> list[int]:
    """The CPUs of this process that no worker of `make_pool(threads)` is pinned to; none where none is pinned."""
    cpus = sorted(os.sched_getaffinity(0)) if cpus is None else cpus
    if len(cpus) <= PIN_ABOVE_CPUS:
        return []
    taken = {cpu for group in pool_groups(threads, cpus, root) for cpu in group}
    return [cpu for cpu in cpus if cpu not in taken]


def make_pool(threads: int | None = None, spin_us: int = 2000) -> _native.WorkerPool:
    """A pool over this process's CPUs."""
    groups = pool_groups(threads)
    pin = len(os.sched_getaffinity(0)) > PIN_ABOVE_CPUS
    from native import _native

    return _native.WorkerPool(groups, pin, spin_us, group_nodes(groups))
