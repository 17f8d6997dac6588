"""What the benchmarks of the CPU kernels share: a pool, the machine's peaks, timing, one line per measurement."""

from __future__ import annotations

import argparse
import importlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from native import topology

_native: Any = importlib.import_module("native._native")


@dataclass(frozen=True)
class Peaks:
    """Measured in this process, just before what is compared with them."""

    bytes_per_s: float
    f32_per_s: float
    bf16_per_s: float
    int8_per_s: float

    def __str__(self) -> str:
        return (
            f"peaks: read {self.bytes_per_s / 1e9:.1f} GB/s; float32 {self.f32_per_s / 1e9:.0f}, "
            f"bf16 {self.bf16_per_s / 1e9:.0f}, int8 {self.int8_per_s / 1e9:.0f} G operations/s"
        )

    def of(self, type: str) -> float:
        """Operations per second of the fastest instruction for "f32", "bf16", "int16" or "int8" inputs; numbers of bf16
        may be multiplied as float32. A vector's product of int16 has twice the numbers of float32's, at its rate."""
        bf16, int16 = max(self.bf16_per_s, self.f32_per_s), 2 * self.f32_per_s
        return {"f32": self.f32_per_s, "bf16": bf16, "int16": int16, "int8": self.int8_per_s or self.f32_per_s}[type]


# What reading reached at best on machines that the figures were judged by, GB/s: (CPU family, model, threads).
_KNOWN_READ = {("6", "167", 2): 35.0}


LEAST_OF_KNOWN_READ = 0.85  # below it a run is void


def known_read_gb_s(cpuinfo: Mapping[str, str], threads: int) -> float | None:
    """The bandwidth that was seen on such a machine, by the fields of /proc/cpuinfo; None for one not known."""
    return _KNOWN_READ.get((cpuinfo.get("cpu family", ""), cpuinfo.get("model", ""), threads))


def compared(peaks: Peaks, known_gb_s: float | None) -> str:
    """The read bandwidth beside the known one: far below it, the run is void."""
    if known_gb_s is None:
        return ""
    share = peaks.bytes_per_s / 1e9 / known_gb_s
    slow = ": TOO SLOW, something else runs" if share < LEAST_OF_KNOWN_READ else ""
    return f"; {share:.0%} of the {known_gb_s:.0f} GB/s known here{slow}"


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", default="", help="avx2, avx512 or amx; default: the best")
    parser.add_argument("--repeats", type=int, default=7, help="the best of so many is printed")
    return parser


def make_pool(threads: int) -> Any:
    cpus = len(os.sched_getaffinity(0))
    if threads > cpus:
        raise SystemExit(f"--threads {threads}: this process may use {cpus}")
    return topology.make_pool(threads)


def measure_peaks(pool: Any, isa: str, read_bytes: int = 1 << 30) -> Peaks:
    """`read_bytes`: more than all caches hold, or the read peak is a cache's."""

    def peak(type: str) -> float:
        return float(_native.peak_operations(pool, type, isa=isa))

    return Peaks(_native.read_bandwidth(pool, read_bytes, repeats=5, isa=isa), peak("f32"), peak("bf16"), peak("int8"))


def best_s(pool: Any, repeats: int, run: Callable[[], None]) -> float:
    """Seconds of the fastest of `repeats` runs, after one to warm up; the pool is held awake as within a step."""
    pool.begin_step()
    run()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    pool.end_step()
    return best


def line(what: str, seconds: float, num_bytes: float, operations: float, peaks: Peaks, type: str) -> str:
    """Time, achieved bytes and operations, and each as a share of its peak."""
    rate, work = num_bytes / seconds, operations / seconds
    return (
        f"{what:<44} {seconds * 1e6:>10.0f} us {rate / 1e9:>8.1f} GB/s {rate / peaks.bytes_per_s:>5.0%} of read "
        f"{work / 1e9:>8.0f} Gop/s {work / peaks.of(type):>5.0%} of {type}"
    )
