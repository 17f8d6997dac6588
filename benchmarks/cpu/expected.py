"""Rates that `ktserve plan` expects beside those that a server then has, for formats of Qwen3-30B-A3B's shape.

    python -m benchmarks.cpu.expected --models /large/disk --type Q8_0 --type Q4_K_M --out benchmarks/results/NAME.json

A file of each type is made in --models if it is not there (8 layers: 2.9 to 10 GB) and `ktserve bench --quick` serves
and measures it. Expected is what `ktserve plan` says, which takes the experts of several sequences as chosen
independently, and then with as many distinct experts as were chosen; `off` is how far the measured rate lies outside of
the latter span, as a share of the nearer end: 0 within it. For a machine that does nothing else. Exit status 1 if a
rate is off by more than --within.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from benchmarks import record
from benchmarks.models.make import made_model
from benchmarks.models.shapes import Shape
from benchmarks.report.expected import table
from engine.planning.expected import work_of
from engine.weights.open import open_model
from ktserve.launcher import program

TYPES = ("Q8_0", "Q4_K_M", "BF16")


class ExpectedError(Exception):
    """A file could not be served."""


def rows(models: Path, layers: int, types: Sequence[str], flags: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each type and rate: the points of `ktserve bench --quick` with `type` and `off`."""
    for mix in types:
        path = made_model(models, Shape(layers=layers), mix)
        with tempfile.TemporaryDirectory(prefix="ktserve-expected-") as folder:
            file = Path(folder) / "quick.json"
            argv = program("bench", "--quick", "--json", str(file), "--", str(path), *flags)
            done = subprocess.run(argv, check=False, capture_output=True, text=True)
            if done.returncode:
                raise ExpectedError(f"{path.name}: {done.stderr.strip()[-1000:]}")
            points = json.loads(file.read_text())["quick"]
        for point in points:
            span = _with_experts(path, point)
            yield {"type": mix, **point, "with_experts_tokens_s": span, "off": off(point["tokens_s"], span)}


def _with_experts(path: Path, point: dict[str, Any]) -> list[float] | None:
    """The expected span of 8 sequences, whose steps' experts were others than expected; of other points as it is."""
    span, experts = point["expected_tokens_s"], point["experts"]
    if span is None or experts is None or point["key"] != "decode_8":
        return cast("list[float] | None", span)
    work = work_of(open_model(str(path)))
    ratio = work.step_bytes(8) / work.step_bytes(8, experts)
    return [round(ratio * end, 2) for end in span]


def off(measured: float, span: Sequence[float] | None) -> float | None:
    """0 within the span, below 0 under it; None without one."""
    if span is None:
        return None
    nearest = min(max(measured, span[0]), span[1])
    return round(measured / nearest - 1, 3)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder for the files")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--type", action="append", default=[], help=f"may be repeated (default: {', '.join(TYPES)})")
    parser.add_argument("--within", type=float, default=0.15, help="share by which a rate may be off (default: 0.15)")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("serve", nargs="*", help="flags for the server, after --")
    args = parser.parse_args(argv)
    found: list[dict[str, Any]] = []
    try:
        for row in rows(args.models, args.layers, args.type or TYPES, args.serve):
            found.append(row)
            print(f"{row['type']}, {row['what']}: {row['tokens_s']}, off by {row['off']}", flush=True)
    except ExpectedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(found))
    if args.out is not None:
        record.write(args.out, {"layers": args.layers, "rows": found})
    return 1 if any(row["off"] is not None and abs(row["off"]) > args.within for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
