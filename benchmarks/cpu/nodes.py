"""Weights divided over NUMA nodes, tried on a machine of one: the same engine with its workers in one group, or in two.

    python -m benchmarks.cpu.nodes --models DIR [--types Q4_K_M] [--layers 8] [--rounds 5]

Two groups are what two nodes would be: each has half of the CPUs and half of the panels of every matrix, and takes
work items from the other only when its own are done. Here both read the same memory. So this shows what dividing costs
on every machine, not what it saves on one where the other node's memory is slow. Turns alternate; medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.cpu.engine import BenchEngine
from benchmarks.cpu.state import SHORT
from benchmarks.models.make import TYPES, made_model
from benchmarks.models.shapes import Shape
from native import topology


@contextmanager
def nodes(count: int) -> Iterator[None]:
    """Pools made meanwhile see this process's CPUs as so many nodes."""

    def divided(cpus: list[int], *_: Any) -> list[list[int]]:
        return [cpus[i * len(cpus) // count : (i + 1) * len(cpus) // count] for i in range(count)]

    with patch.object(topology, "numa_nodes", divided):
        yield


def compare(model: Path, shape: Shape, mix: str, rounds: int, rows: list[int], prompt: int, tokens: int) -> None:
    engines: dict[int, BenchEngine] = {}
    try:
        for count in (1, 2):
            with nodes(count):
                engines[count] = BenchEngine(model, shape, mix, len(os.sched_getaffinity(0)), pack_cache="off")
            groups = engines[count].pool.groups
            if groups != count:
                raise SystemExit(f"{groups} groups of workers instead of {count}: this needs two CPUs or more")
        turns: dict[str, dict[int, list[float]]] = {}
        for i in range(rounds):
            for count in (1, 2) if i % 2 else (2, 1):
                engine = engines[count]
                for n in rows:
                    speed = n / engine.decode(n, tokens, SHORT)
                    turns.setdefault(f"decode, {n} rows", {}).setdefault(count, []).append(speed)
                speed = prompt / engine.prefill(prompt)
                turns.setdefault(f"prefill {prompt}", {}).setdefault(count, []).append(speed)
        for what, seen in turns.items():
            one, two = (statistics.median(seen[count]) for count in (1, 2))
            ratios = [b / a for a, b in zip(seen[1], seen[2], strict=True)]
            print(f"| {mix} | {what} | {one:.1f} | {two:.1f} | {statistics.median(ratios):.3f} |", flush=True)
    finally:
        for engine in engines.values():
            engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--types", nargs="+", choices=TYPES, default=["Q4_K_M"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    shape = Shape(layers=args.layers)
    print("| type | | one group, tok/s | two, tok/s | two / one |\n|---|---|---|---|---|")
    for mix in args.types:
        compare(made_model(args.models, shape, mix), shape, mix, args.rounds, [1, 8, 32], 512, 24)


if __name__ == "__main__":
    main()
