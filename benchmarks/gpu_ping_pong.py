"""Decode steps as two half-batches in turn against whole ones, and what the automatic choice takes.

    python -m benchmarks.gpu_ping_pong [--layers 16] [--quantise int4] [--rows 2 4 8 16] [--context 512 32768]
                                       [--out FILE.json]

Qwen3-30B-A3B's shape with random weights, experts on the CPU pool, the engine's own steps. Of each context and rows:

whole, halves   ms a step as one CUDA graph each; in brackets what the cost model makes of it once steps have been seen
auto            ms a step by the automatic choice; `halved`: its share of steps in halves; `better`: auto / the better
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_decode import Bench
from engine.graphs import PaddedDecode
from engine.ping_pong import Always, Chooser, Costs, Measured, Work
from engine.ping_pong_measure import measure

ROUNDS, STEPS = 8, 20  # of each way in turn, since a shared machine changes from second to second
SETTLED = 2  # rounds that the automatic choice learns in


class Counting(Measured):
    def __init__(self, costs: Costs) -> None:
        super().__init__(costs)
        self.taken: list[bool] = []

    def halves(self, work: Work) -> bool:
        self.taken.append(super().halves(work))
        return self.taken[-1]


def step_s(bench: Bench, padded: PaddedDecode, rows: int, first: int, chooser: Chooser | None) -> list[float]:
    """Times from token to token, one step ahead; without the first two, which the way before shares."""
    padded.chooser = chooser
    return bench.step_times(rows, first=first, count=STEPS)[2:]


def compare(bench: Bench, padded: PaddedDecode, costs: Costs, rows: int) -> dict[str, Any]:
    auto = Counting(costs)
    ways: dict[str, Chooser | None] = {"whole": None, "halves": Always(), "auto": auto}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS):
        for place, (name, chooser) in enumerate(ways.items()):
            found = step_s(bench, padded, rows, (number * len(ways) + place) * STEPS, chooser)
            times[name] += found if number >= SETTLED else []
    ms = {f"{name}_ms": statistics.mean(sorted(found)[: -len(found) // 10]) * 1e3 for name, found in times.items()}
    predicted = auto.predict(Work(rows, rows * bench.context, False))
    taken = auto.taken[SETTLED * STEPS :]
    return (
        {"rows": rows, "context": bench.context}
        | ms
        | {
            "predicted_whole_ms": predicted[0] * 1e3,
            "predicted_halves_ms": predicted[1] * 1e3,
            "halved": sum(taken) / len(taken),
            "over_better": ms["auto_ms"] / min(ms["whole_ms"], ms["halves_ms"]),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--context", type=int, nargs="+", default=[512, 32768])
    parser.add_argument("--quantise", choices=("int8", "int4"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if min(args.rows) < 2:
        parser.error("--rows: at least 2, one row has no halves")
    contexts = args.context
    options = {"context": max(contexts), "experts": "native", "adapters": 0}
    bench = Bench.load(argparse.Namespace(**(vars(args) | options)))
    padded = bench.runner.pad_decode(bench.max_rows, 0, bench.scratch)
    began = time.perf_counter()
    with bench.runner.computing():
        padded.capture(lambda *_: None)
        captured_s, began = time.perf_counter() - began, time.perf_counter()
        costs = measure(padded, bench.scratch, max(contexts))
        measured_s = time.perf_counter() - began
        padded.halve(padded.buckets)
        padded.capture(lambda *_: None, halves=True)
    fixed_us = costs.gpu_s(1, 0, False) * 1e6
    print(
        f"graphs captured in {captured_s:.1f} s, costs measured in {measured_s:.1f} s: "
        f"GPU {fixed_us:.0f} us a layer and "
        f"{costs.read_s * 1e9:.2f} ns a position, pool {costs.pool_s.at(8) * 1e6:.0f} us for 8 experts, "
        f"{costs.pool_s.at(64) * 1e6:.0f} for 64"
    )
    print(f"{'context':>8}{'rows':>5}{'whole':>18}{'halves':>18}{'auto':>9}{'halved':>8}{'better':>8}")
    results = []
    for context in contexts:
        bench.context = context
        for rows in args.rows:
            r = compare(bench, padded, costs, rows)
            results.append(r)
            print(
                f"{r['context']:8}{rows:5}{r['whole_ms']:9.2f} ({r['predicted_whole_ms']:6.2f})"
                f"{r['halves_ms']:9.2f} ({r['predicted_halves_ms']:6.2f}){r['auto_ms']:9.2f}{r['halved']:8.0%}"
                f"{r['over_better']:8.2f}",
                flush=True,
            )
    if args.out:
        about = {
            "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "layers": args.layers,
            "quantise": args.quantise, "gpu_us": fixed_us, "read_ns": costs.read_s * 1e9,
        }  # fmt: skip
        args.out.write_text(json.dumps({"about": about, "results": results}, indent=1))


if __name__ == "__main__":
    main()
