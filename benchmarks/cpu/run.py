"""The whole engine and server on a CPU, beside llama.cpp on the same files in the same run, in turn.

    python -m benchmarks.cpu.run --models DIR --llama BINARIES            # all rows; make bench-cpu
    python -m benchmarks.cpu.run --models DIR --rows decode,batch --types Q8_0 --quick

Models and adapters that DIR lacks are written there first (Q8_0 5.4 GB, Q4_K_M 3.1 GB, BF16 10 GB, the same again for
packed experts). Without --llama the peer's columns stay empty. Results are written after every row, so an
interruption loses one row; `python -m benchmarks.report.pages` makes tables and plots of them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.client import StreamError
from benchmarks.cpu.engine import RunError
from benchmarks.cpu.rows import ROWS
from benchmarks.cpu.state import Run, describe_machine
from benchmarks.models.make import TYPES
from benchmarks.models.shapes import Shape
from benchmarks.peers.kt import KtError
from benchmarks.peers.llamacpp import PeerError
from engine.errors import KtserveError

RESULTS = Path(__file__).parents[1] / "results" / "cpu.json"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder of the random models; large")
    parser.add_argument("--llama", type=Path, help="folder with llama-bench, llama-batched-bench, llama-server")
    usual = ",".join(name for name in ROWS if name != "long")
    parser.add_argument("--rows", default=usual, help=f"default: {usual}; long: prompts of 8192 and 32768 tokens")
    parser.add_argument("--types", default=",".join(TYPES), help=f"default: {','.join(TYPES)}")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, help="default: all that this process may use")
    parser.add_argument("--minutes", type=float, default=26, help="time for all rows; repetitions are cut to fit")
    parser.add_argument("--quick", action="store_true", help="one small repetition of everything: shows that it works")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    args.rows, args.types = args.rows.split(","), args.types.split(",")
    for given, known, flag in ((args.rows, ROWS, "--rows"), (args.types, TYPES, "--types")):
        if unknown := [word for word in given if word not in known]:
            parser.error(f"{flag} {','.join(unknown)}: choose from {','.join(known)}")
    return args


def measure(args: argparse.Namespace, shape: Shape) -> Run:
    """All rows that were asked for. A row that fails is reported and recorded, the others go on."""
    run = Run(args, shape)
    todo = [(mix, row) for mix in args.types for row in args.rows if mix in ROWS[row][2]]
    if not run.peer:
        print("no --llama: the peer's columns stay empty")
    try:
        for i, (mix, row) in enumerate(todo):
            seconds = ROWS[row][1]
            now = time.monotonic()
            if now > run.end_s:
                run.leave_out(row, mix, "out of time")
                continue
            left = sum(ROWS[name][1] for _, name in todo[i:])
            run.row_end_s = now + (run.end_s - now) * seconds / left
            try:
                measure_row(run, row, mix)
            except (PeerError, KtError, StreamError, RunError, KtserveError) as error:
                print(f"  {row} {mix}: {error}", flush=True)
                run.leave_out(row, mix, str(error))
                run.release()
    finally:
        run.release()
        run.write()
    return run


def measure_row(run: Run, row: str, mix: str) -> None:
    """Where the peer fails this is reported, and ours are measured without it."""
    function, known, peer = ROWS[row][0], len(run.data["rows"]), run.peer
    try:
        function(run, mix)
    except PeerError as error:
        if peer is None:
            raise
        print(f"  {row} {mix}: without llama.cpp: {error}", flush=True)
        run.leave_out(row, mix, f"llama.cpp: {error}")
        del run.data["rows"][known:]
        run.release()
        run.peer = None
        try:
            function(run, mix)
        finally:
            run.peer = peer


def keep_other_machines(out: Path, machine: dict[str, Any]) -> None:
    """SystemExit if `out` holds the results of another machine."""
    if out.exists():
        there = json.loads(out.read_text())["machine"]
        if (there["cpu"], there["threads"]) != (machine["cpu"], machine["threads"]):
            known = f"{there['cpu']}, {there['threads']} threads"
            raise SystemExit(f"{out} holds the results of {known}: choose another with --out (OUT= of make)")


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    args = parse()
    keep_other_machines(args.out, describe_machine(args.threads))
    run = measure(args, Shape(layers=args.layers))
    print(f"{args.out} after {run.data['seconds']} s")
    for line in run.data.get("left_out", []):
        print(f"left out: {line}")


if __name__ == "__main__":
    main()
