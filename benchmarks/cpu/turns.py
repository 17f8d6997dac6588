"""Two checkouts of this project, turn by turn on this CPU: decode of 1, 8 and 32 sequences, prompts of 512 and 2048.

    python -m benchmarks.cpu.turns --before PATH [--models DIR] [--types Q8_0 Q4_K_M] [--out FILE]

PATH is another checkout whose native kernels are built (in place, or found by its own PYTHON). Both load one model and
stay; each row is measured by one and then by the other, so that a machine's drift falls on both; half of the rounds
after loading in the other order. A ratio above 1: this checkout is faster.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROWS: dict[str, tuple[str, int]] = {
    "decode 1": ("decode", 1),
    "decode 8": ("decode", 8),
    "decode 32": ("decode", 32),
    "prefill 512": ("prefill", 512),
    "prefill 2048": ("prefill", 2048),
}
CONTEXT = 64  # tokens of the prompts that are decoded behind


def serve(model: str, mix: str, layers: int, threads: int) -> None:
    """In a checkout's own process: a row per line of input, its tokens a second per line of output."""
    from benchmarks.cpu.engine import BenchEngine
    from benchmarks.models.make import Shape  # type: ignore[attr-defined]  # where older checkouts have it, too

    engine = BenchEngine(Path(model), Shape(layers=layers), mix, threads)
    gc.collect()
    gc.freeze()  # older checkouts' engines do not, and a full collection would fall into one side's steps
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        kind, size, steps = json.loads(line)
        rate = size / engine.decode(size, steps, CONTEXT) if kind == "decode" else size / engine.prefill(size)
        print(json.dumps(rate), flush=True)
    engine.close()


class Side:
    """A checkout with a loaded model."""

    def __init__(self, checkout: Path, arguments: list[str]) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", *arguments]
        self._process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(('"', *"0123456789")):
                return json.loads(line)
        raise SystemExit(f"the other process ended with {self._process.wait()}")

    def rate(self, kind: str, size: int, steps: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([kind, size, steps]) + "\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(before: Path, model: Path, mix: str, args: argparse.Namespace) -> dict[str, Any]:
    arguments = [str(model), mix, str(args.layers), str(args.threads)]
    names = {"before": before, "after": ROOT}
    rates: dict[str, dict[str, list[float]]] = {row: {name: [] for name in names} for row in ROWS}
    for order in (list(names), list(reversed(names))):  # who loads first gets the better pages of memory
        sides = {name: Side(names[name], arguments) for name in order}
        for turn in range(-(-args.rounds // 2) + 1):  # the first warms up
            for row, (kind, size) in ROWS.items():
                for name in order if turn % 2 else reversed(order):
                    rate = sides[name].rate(kind, size, args.steps)
                    if turn:
                        rates[row][name].append(rate)
        for side in sides.values():
            side.close()
    found = {}
    for row, held in rates.items():
        pairs = [after / earlier for earlier, after in zip(held["before"], held["after"], strict=True)]
        medians = {name: statistics.median(values) for name, values in held.items()}
        found[row] = medians | {"ratio": statistics.median(pairs), "least": min(pairs), "most": max(pairs)}
        print(f"{mix:8} {row:13} {medians['before']:10.1f} {medians['after']:10.1f} tok/s  x{found[row]['ratio']:.3f} "
              f"({min(pairs):.3f} to {max(pairs):.3f})", flush=True)  # fmt: skip
    return found


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != Path(__file__).parent]
        model, mix, layers, threads = sys.argv[2:6]
        return serve(model, mix, int(layers), int(threads))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="another checkout, with its kernels built")
    parser.add_argument("--models", type=Path, help="folder for the models; default: a temporary one")
    parser.add_argument("--types", nargs="+", default=["Q8_0", "Q4_K_M"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    from benchmarks import record
    from benchmarks.cpu.state import describe_machine, versions
    from benchmarks.models.make import model_path, write_model
    from benchmarks.models.shapes import Shape

    with tempfile.TemporaryDirectory(prefix="ktserve-turns-") as temporary:
        folder = args.models or Path(temporary)
        results: dict[str, Any] = {
            "machine": describe_machine(args.threads),
            "versions": versions(None),
            "layers": args.layers,
            "rows": {},
        }
        for mix in args.types:
            path = model_path(folder, args.layers, mix)
            if not path.exists():
                write_model(path, Shape(layers=args.layers), mix)
            results["rows"][mix] = compare(args.before.resolve(), path, mix, args)
    if args.out:
        record.write(args.out, results)


if __name__ == "__main__":
    main()
