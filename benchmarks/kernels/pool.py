"""What the worker pool costs: a call on a warm pool, a call on a parked one, an idle pool.

    python -m benchmarks.kernels.pool [--threads N]

A parked call is compared with the machine's own wake of one thread by a futex, in turn; idle is the CPU time of the
whole process while nobody calls.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import time
from typing import Any

from benchmarks.kernels.probe import make_pool

_native: Any = importlib.import_module("native._native")
ROUNDS = 20
US = 1e6


def warm(pool: Any) -> tuple[float, float]:
    """Seconds of an empty call with one piece per worker, within a step: the median and the least."""
    pool.begin_step()
    seconds = pool.latencies(20_000, gap_us=5)
    pool.end_step()
    return statistics.median(seconds), min(seconds)


def parked(pool: Any) -> list[tuple[float, float]]:
    """Seconds of an empty call on sleeping workers, and of one futex wake: medians of rounds in turn."""
    return [
        (statistics.median(pool.latencies(100, gap_us=200)), statistics.median(_native.futex_wakes(100, gap_us=200)))
        for _ in range(ROUNDS)
    ]


def idle(in_step: bool, pool: Any, seconds: float = 2.0) -> float:
    """CPUs that are busy while nobody calls."""
    if in_step:
        pool.begin_step()
    time.sleep(0.1)
    used, start = time.process_time(), time.perf_counter()
    time.sleep(seconds)
    share = (time.process_time() - used) / (time.perf_counter() - start)
    if in_step:
        pool.end_step()
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    pool = make_pool(parser.parse_args().threads)
    median, least = warm(pool)
    print(f"{pool.threads} threads, {pool.groups} nodes")
    print(f"call on a warm pool     {median * US:6.2f} us median, {least * US:.2f} least   (to reach: under 5)")
    calls = parked(pool)
    call, wake = (statistics.median(values) for values in zip(*calls, strict=True))
    ratio = statistics.median(call / wake for call, wake in calls)
    print(f"call on a parked pool   {call * US:6.2f} us; a futex wake {wake * US:.2f} us: {ratio:.2f}x   (under 2x)")
    print(f"idle, parked            {idle(False, pool):6.2%} of a CPU   (under 1%)")
    print(f"idle within a step      {idle(True, pool):6.2%} of a CPU   (workers park 2 ms after the last call)")


if __name__ == "__main__":
    main()
