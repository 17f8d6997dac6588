"""One GPU beside several: are the answers the same, and how much faster are they. One call does all of it.

    python -m benchmarks.gpu.ranks --models DIR [--ranks 1 2 4] [--layers 8] [--rows 1 8 32 128] [--out FILE]

tests    `tests/gpu/test_tensor_parallel.py`, whose tests skip counts of GPUs that are not here
bf16     a random model of Qwen3-30B-A3B's shape, all on the GPUs: `benchmarks.gpu.served` with --tensor-parallel N
whole    the same with --expert-parallel
Q4_K_M   a GGUF file of that shape, whose experts cannot be divided by rows

Each run is a process of its own that ends before the next begins, and is left out when the time is over (--minutes). A
row has tokens a second, the ratio to one GPU, the seconds to load, and what ranks exchange in a step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.gpu.tests import outcome
from benchmarks.models.configs import QWEN3_30B_A3B

ROOT = Path(__file__).parents[2]
TESTS = "tests/gpu/test_tensor_parallel.py"
_FORMS: dict[str, list[str]] = {"bf16": [], "whole": ["--expert-parallel"], "Q4_K_M": []}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="where random models are written, or lie")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--forms", nargs="+", choices=_FORMS, default=list(_FORMS))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=["--expert-backend", "gpu"])
    parser.add_argument("--out", type=Path, default=record.RESULTS / "gpu-ranks.json")
    args = parser.parse_args(argv)
    until = time.monotonic() + 60 * args.minutes
    found: dict[str, Any] = {"layers": args.layers, "rows": []}
    with tempfile.TemporaryDirectory(prefix="ktserve-ranks-") as folder:
        if not args.no_tests:
            found["tests"] = _tests(Path(folder) / "tests.xml", until)
            print(f"tests: {found['tests']}", flush=True)
        for form in args.forms:
            for ranks in args.ranks:
                if ranks == 1 and form == "whole":
                    continue
                run = _served(args, form, ranks, Path(folder) / "served.json", until)
                found["rows"].append({"form": form, "ranks": ranks, **run})
                print(json.dumps(found["rows"][-1]), flush=True)
                record.write(args.out, found)  # what a call that is cut off has seen
    print(table(found["rows"]))
    return 0 if all("error" not in row for row in found["rows"]) else 1


def _tests(report: Path, until: float) -> dict[str, Any]:
    words = [sys.executable, "-m", "pytest", TESTS, "-q", f"--junitxml={report}"]
    try:
        subprocess.run(words, cwd=ROOT, check=False, timeout=max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return {"error": "not over in time"}
    return outcome(report) if report.exists() else {"error": "pytest has written no report"}


def _served(args: argparse.Namespace, form: str, ranks: int, out: Path, until: float) -> dict[str, Any]:
    """`seconds` of the whole run; `tok_s` by rows, `loaded_s` and `exchanged_mb`, or `error`."""
    flags = [*args.serve, *_FORMS[form], "--tensor-parallel", str(ranks)]
    words = [sys.executable, "-m", "benchmarks.gpu.served", "--no-http", "--layers", str(args.layers)]
    words += ["--rows", *map(str, args.rows), "--out", str(out), f"--serve={' '.join(flags)}"]
    words += ["--model", str(_model(args, form))]
    out.unlink(missing_ok=True)
    began = time.monotonic()
    try:
        done = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, timeout=max(1.0, until - began))
    except subprocess.TimeoutExpired:
        return {"error": "not over in time"}
    if not out.exists():
        return {"error": done.stderr.decode(errors="replace").strip()[-400:]}
    held = json.loads(out.read_text())
    tok_s = {str(row["rows"]): round(row["engine_tok_s"], 1) for row in held["results"]}
    step_mb = {rows: exchanged_mb(int(rows), args.layers, ranks) for rows in tok_s}
    seconds = {"loaded_s": round(held["about"]["loaded_s"], 1), "seconds": round(time.monotonic() - began)}
    return {"tok_s": tok_s, "exchanged_mb": step_mb, **seconds}


def exchanged_mb(rows: int, layers: int, ranks: int) -> float:
    """What a rank sends and receives in a decode step: two sums of [rows, H] in bf16 a layer, by a ring."""
    each = rows * int(QWEN3_30B_A3B["hidden_size"]) * 2
    return round(2 * layers * each * 2 * (ranks - 1) / ranks / 1e6, 3)


def _model(args: argparse.Namespace, form: str) -> Path:
    if form != "Q4_K_M":
        return Path(args.models) / f"bf16-{args.layers}"
    path = Path(args.models) / f"random-{args.layers}L-Q4_K_M.gguf"
    if not path.exists():
        words = ["--out", str(args.models), "--layers", str(args.layers), "--type", "Q4_K_M"]
        subprocess.run([sys.executable, "-m", "benchmarks.models.make", *words], cwd=ROOT, check=True)
    return path


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Tokens a second and, against one GPU with the same form ("whole" against bf16), their ratio."""
    sizes = list(dict.fromkeys(size for row in rows for size in row.get("tok_s", {})))
    heads = ["form", "GPUs", *(f"{size} streams" for size in sizes), "loaded in s"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    one = {row["form"]: row["tok_s"] for row in rows if row["ranks"] == 1 and "tok_s" in row}
    for row in rows:
        cells = [str(row.get("error", "-"))[:40]] * len(sizes)
        if "tok_s" in row:
            base = one.get("bf16" if row["form"] == "whole" else row["form"], {})
            cells = [
                f"{row['tok_s'][size]:.0f}" + (f" ({row['tok_s'][size] / base[size]:.2f}x)" if size in base else "")
                for size in sizes
            ]
        lines.append(f"| {' | '.join([row['form'], str(row['ranks']), *cells, str(row.get('loaded_s', '-'))])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
