"""What planning and committing a step costs, by the requests that wait: CPU time of the real scheduler.

python -m benchmarks.front.steps [--out docs/front-steps.svg]     # JSON lines, and a plot

Every request has a deadline; 16 tenants and 16 adapters in 8 slots; 32 requests run. Medians over steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ktserve.plot import Line, plot
from scheduler.config import SchedulerConfig
from scheduler.request import AdapterKey, Request, SamplingParams
from scheduler.scheduler import Scheduler

WAITING = (10, 100, 1000, 10_000)
RUNNING = 32
_TENANTS = _ADAPTERS = 16


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.front.steps", description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, help="file for a plot, SVG")
    args = parser.parse_args(argv)
    found = {waiting: step_us(waiting, args.steps) for waiting in WAITING}
    for waiting, micros in found.items():
        print(json.dumps({"waiting": waiting, "step_us": round(micros, 1)}))
    if args.out:
        line = Line("expire, schedule and commit", [(float(n), micros) for n, micros in found.items()])
        title = f"Cost of a scheduling step, {RUNNING} running"
        args.out.write_text(plot([line], title=title, x="requests waiting", y="us of CPU", log_x=True))
    return 0


def step_us(waiting: int, steps: int) -> float:
    """The median step's CPU time in microseconds; nothing ends meanwhile."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=65536, max_num_seqs=RUNNING, max_num_batched_tokens=512, max_model_len=1 << 20,
            max_queue=waiting + RUNNING, num_adapter_slots=8, eos_token_ids=(0,), prefix_caching=False,
        )
    )  # fmt: skip
    for i in range(waiting + RUNNING):
        adapter = AdapterKey(1 + i % _ADAPTERS, 1)
        sampling = SamplingParams(max_tokens=1 << 19, ignore_eos=True)
        request = Request(f"r{i}", [1] * 64, sampling, adapter, f"tenant-{i % _TENANTS}", deadline=1e9 + i)
        scheduler.add(request, 0.001 * i)
    now, spent = 1000.0, []
    for number in range(steps + 50):
        now += 0.02
        began = time.process_time_ns()
        scheduler.expire(now)
        plan = scheduler.schedule(now)
        for load in scheduler.slot_loads():
            scheduler.slot_loaded(load.slot)
        if plan is not None:
            scheduler.commit(plan, [[7] if row.samples else [] for row in plan.rows], now)
        if number >= 50:
            spent.append((time.process_time_ns() - began) / 1000)
    gc.collect()
    return statistics.median(spent)


if __name__ == "__main__":
    sys.exit(main())
