"""kt_kernel as a guest in this process: loading it, keeping it quiet, one pool per process, how many threads."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import ExpertBackendError, UserError
from native.topology import cpu_quota, node_cpus

# kt_kernel keeps process-wide scratch memory: two pools at work give wrong results, and a pool's packed weights are
# never given back. So this process may have one, and that fact is the process's, not an object's: hence a module
# variable. It holds the pid that made the pool (a fork inherits the claim but not the threads).
_CLAIM: list[int] = []
_CLAIM_LOCK = threading.Lock()


def kt_available() -> tuple[bool, str]:
    """Whether kt_kernel loads here; if not, why. Nothing is imported until this is called."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False, f"kt_kernel needs Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    libc, version = platform.libc_ver()
    if libc == "glibc" and tuple(int(part) for part in version.split(".")[:2]) < (2, 35):
        return False, f"kt_kernel's wheel needs glibc 2.35, this is {version}"
    if not (3, 10) <= sys.version_info[:2] <= (3, 12):
        return False, f"kt_kernel's wheels are for Python 3.10 to 3.12, this is {platform.python_version()}"
    if "avx2" not in _cpu_flags():
        return False, "kt_kernel needs a CPU with AVX2"
    try:
        load_extension()
    except (ImportError, OSError, RuntimeError) as e:
        return False, f"kt_kernel does not load: {e}"
    return True, ""


def load_extension() -> Any:
    """kt_kernel's compiled module, in the variant that it chooses for this CPU. Raises what its import raises."""
    with stdout_to_stderr(), same_float_mode():
        from kt_kernel import kt_kernel_ext
    return kt_kernel_ext


@contextlib.contextmanager
def same_float_mode() -> Iterator[None]:
    """kt_kernel is built with -ffast-math: loading it makes this thread, and those that it starts later, take
    subnormal numbers for zero. Undo that, or every float of the process would change a little."""
    flushing = sys.float_info.min / 2 == 0.0
    try:
        yield
    finally:
        torch.set_flush_denormal(flushing)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """kt_kernel prints from C to file descriptor 1; let that go to 2 meanwhile."""
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    libc.fflush(None)
    try:
        saved = os.dup(1)
    except OSError:  # no stdout, nothing to keep clean
        yield
        return
    os.dup2(2, 1)
    try:
        yield
    finally:
        libc.fflush(None)
        os.dup2(saved, 1)
        os.close(saved)


def claim_process() -> None:
    """Take this process's one pool. ExpertBackendError if it has been taken, here or before a fork."""
    with _CLAIM_LOCK:
        if not _CLAIM:
            _CLAIM.append(os.getpid())
            return
        if _CLAIM[0] != os.getpid():
            raise ExpertBackendError(
                f"kt_kernel was started in process {_CLAIM[0]} and does not survive fork: start {os.getpid()} by spawn"
            )
        raise ExpertBackendError(
            "this process has a kt backend already (kt_kernel allows one, and a closed one keeps its memory): "
            "start another process, or use the native or reference backend"
        )


def release_claim() -> None:
    """Give the claim back where making the pool failed."""
    with _CLAIM_LOCK:
        _CLAIM.clear()


@dataclass(frozen=True)
class Cpus:
    """The CPUs that the pool may use: `count` of them on NUMA node `node`."""

    count: int
    node: int


def usable_cpus(
    affinity: set[int] | None = None, nodes: dict[int, set[int]] | None = None, quota: float | None = None
) -> Cpus:
    """This process's CPUs on the NUMA node that has most of them, within the cgroup's quota.

    The arguments stand in for what the system says: affinity mask, node -> CPUs, CPUs' worth of time.
    """
    mine = os.sched_getaffinity(0) if affinity is None else affinity
    nodes = node_cpus() if nodes is None else nodes
    quota = cpu_quota() or float("inf") if quota is None else quota
    node, cpus = max(nodes.items(), key=lambda item: (len(item[1] & mine), -item[0]), default=(0, mine))
    count = len(cpus & mine) or len(mine)
    return Cpus(max(1, int(min(count, quota))), node)


def pool_threads(threads: int | None, cpus: Cpus) -> int:
    """Workers beside kt_kernel's own queue thread, which spins: as many workers as CPUs would wait for each other's
    time slices. One on up to three CPUs, else two fewer than there are. UserError if `threads` leaves no room."""
    if threads is None:
        return max(1, cpus.count - 2)
    most = max(1, cpus.count - 1)
    if not 1 <= threads <= most:
        raise UserError(
            f"cpu_threads {threads}: kt takes 1 to {most} here ({cpus.count} CPUs, one is left to its queue thread)",
            field="cpu_threads",
        )
    return threads


def _cpu_flags() -> set[str]:
    with open("/proc/cpuinfo") as f:
        for line in f:
            if line.startswith("flags"):
                return set(line.partition(":")[2].split())
    return set()
