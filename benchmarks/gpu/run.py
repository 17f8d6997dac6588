"""Every row of docs/performance-gpu.md on this machine's GPU: each part in a process of its own, one after another.

    python -m benchmarks.gpu.run                            # all parts: make bench-gpu
    python -m benchmarks.gpu.run --parts decode int8        # these only
    python -m benchmarks.gpu.run --quick --out dry-run      # two layers, few rows: shows that it works
    python -m benchmarks.gpu.run --list                     # the commands

Processes of their own because kt_kernel never gives its memory back and a model of 48 layers fills the machine. A part
that fails is reported at the end and the others go on. The parts `llamacpp` need --llama and --models.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Part:
    """One command; `out` is its file of results, `needs` that of a part it compares itself with."""

    module: str
    flags: str
    out: str
    quick: str = "--layers 2 --rows 1 8"
    needs: str = ""


# The first is kt_kernel in the same graph: the parts after it compare themselves with its results.
PARTS = {
    "kt": Part("gpu.decode", "--experts kt", "gpu-decode-kt.json"),
    "decode": Part("gpu.decode", "", "gpu-decode.json", needs="gpu-decode-kt.json"),
    "kt-int8": Part("gpu.decode", "--experts kt --quantise int8", "gpu-decode-kt-int8.json"),
    "int8": Part("gpu.decode", "--quantise int8", "gpu-decode-int8.json", needs="gpu-decode-kt-int8.json"),
    "adapters": Part("gpu.decode", "--rows 32 --adapters 16", "gpu-decode-adapters.json", "--layers 2 --rows 8"),
    "adapters-int8": Part(
        "gpu.decode",
        "--rows 32 --adapters 16 --quantise int8",
        "gpu-decode-adapters-int8.json",
        "--layers 2 --rows 8",
    ),
    "experts": Part("gpu.experts", "handshake decode gpu", "gpu-experts.json", "--layers 2 --repeats 3 --rows 1 8"),
    "hybrid": Part("gpu.hybrid", "", "gpu-hybrid.json", "--layers 2 --rows 1 8 --seconds 0.2"),
    "timeline": Part("gpu.timeline", "", "gpu-timeline.json", "--layers 2 --prompt 10000"),
    "attention": Part("gpu.attention", "", "gpu-attention.json", ""),
    "prefill": Part("gpu.experts", "prefill", "gpu-prefill.json", "--layers 2 --prefill-rows 512"),
    "served": Part(
        "gpu.served", "--layers 48 --prompt 30000 --serve=--expert-backend=gpu", "gpu-served.json", "--layers 2"
    ),
    "served-cpu": Part(
        "gpu.served", "--layers 48 --prompt 30000 --serve=--expert-backend=native", "gpu-served-cpu.json", "--layers 2"
    ),
    "llamacpp": Part("gpu.llamacpp", "", "gpu-llamacpp-q4_k_m.json", "--layers 2 --rows 1 8 --quick"),
    "llamacpp-q8_0": Part(
        "gpu.llamacpp", "--types Q8_0 --placements cpu", "gpu-llamacpp.json", "--layers 2 --rows 1 8 --quick"
    ),
}


def command(part: Part, args: argparse.Namespace) -> list[str]:
    words = [sys.executable, "-m", f"benchmarks.{part.module}", *part.flags.split()]
    words += part.quick.split() if args.quick else []
    if part.needs and (args.out / part.needs).exists():
        words += ["--peer", str(args.out / part.needs)]
    if part.module == "gpu.llamacpp":
        words += ["--llama", str(args.llama), "--models", str(args.models)]
    return [*words, "--out", str(args.out / part.out)]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, metavar="PART")
    parser.add_argument("--quick", action="store_true", help="a dry run: small and short, its figures mean nothing")
    parser.add_argument("--list", action="store_true", help="print the commands and end")
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp's binaries with CUDA, for the parts llamacpp")
    parser.add_argument("--models", type=Path, help="folder for their models: 9 GB")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args(argv)
    if args.quick and args.out == RESULTS:
        parser.error("--quick needs --out: its figures are not to stand among the others")
    return args


def run(args: argparse.Namespace) -> list[str]:
    """The parts that did not work, with what came of them."""
    failed = []
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.parts:
        if PARTS[name].module == "gpu.llamacpp" and not (args.llama and args.models):
            failed.append(f"{name}: left out, it needs --llama and --models")
            continue
        words = command(PARTS[name], args)
        print(f"== {name}: {shlex.join(['python', *words[1:]])}", flush=True)
        if args.list:
            continue
        began = time.monotonic()
        status = subprocess.run(words, check=False).returncode
        print(f"== {name}: {time.monotonic() - began:.0f} s", flush=True)
        if status:
            failed.append(f"{name}: ended with status {status}")
    return failed


def main() -> None:
    failed = run(parse())
    for line in failed:
        print(line)
    raise SystemExit(1 if any("status" in line for line in failed) else 0)


if __name__ == "__main__":
    main()
