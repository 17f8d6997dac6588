"""Decode with a GPU and the experts on the CPU: ours beside llama.cpp built with CUDA, on the same random GGUF files.

    python -m benchmarks.gpu.llamacpp --models DIR --llama BINARIES [--types Q8_0 BF16] [--rows 1 8] [--out FILE]

Eight layers of Qwen3-30B-A3B's shape, written to DIR if they are not there (Q8_0 5.4 GB, BF16 10 GB). llama.cpp keeps
all layers on the GPU but their experts (`-ngl 99 --n-cpu-moe 99`); a sweep over threads, repacked weights and copies of
experts to the GPU finds its best flags for each number of rows. Then ours and llama.cpp's batched bench decode in turn;
tok/s are medians of the repetitions. BINARIES holds llama-batched-bench, llama-bench and their libraries but cuBLAS,
which is torch's.

--device cpu runs both without a GPU: to see that it works.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu.engine import BenchEngine
from benchmarks.cpu.state import commit, describe_machine, public, versions
from benchmarks.models.make import TYPES, Shape, model_path, write_model
from benchmarks.peers.kt import spare_threads
from benchmarks.peers.llamacpp import Flags, Peer, PeerError

PROMPT = 16  # tokens before those that are timed


def cuda_libraries() -> list[Path]:
    """The folders of the CUDA libraries that torch has loaded into this process."""
    mapped = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libcublas" in line]
    return sorted({Path(path).parent for path in mapped})


def candidates(cpus: int, gpu: bool) -> list[Flags]:
    """The flags to try, one change at a time from the default."""
    start = Flags(spare_threads(cpus), flash=False, gpu=gpu)
    found = [start, replace(start, threads=cpus), replace(start, threads=max(1, cpus // 2))]
    found.append(replace(start, repack=False))
    if gpu:
        found.append(replace(start, offload=False))
        found.append(replace(start, repack=False, offload=False))
    return list(dict.fromkeys(found))


def sweep(peer: Peer, model: Path, tries: Sequence[Flags], rows: list[int], tokens: int) -> list[dict[str, Any]]:
    """What each of the flags reaches at each number of rows; flags that fail are told."""
    lines: list[dict[str, Any]] = []
    for flags in tries:
        try:
            speeds = peer.batched(model, flags, PROMPT, tokens, rows)
        except PeerError as error:
            lines.append({"flags": str(flags), "error": str(error)})
            print(f"  {flags}: {error}", flush=True)
            continue
        lines.append({"flags": str(flags), "tok_s": speeds})
        print(f"  {flags}: " + "  ".join(f"{n}: {speed:.1f}" for n, speed in speeds.items()), flush=True)
    return lines


def best_flags(tries: Sequence[Flags], lines: list[dict[str, Any]], rows: list[int]) -> dict[Flags, list[int]]:
    """The numbers of rows that each of the flags is the fastest at. PeerError if all failed."""
    found: dict[Flags, list[int]] = {}
    for n in rows:
        speeds = [line.get("tok_s", {}).get(n, -math.inf) for line in lines]
        at = max(range(len(lines)), key=lambda i: speeds[i])
        if speeds[at] == -math.inf:
            raise PeerError(f"llama.cpp failed at {n} rows with all flags: {lines[-1].get('error', 'no such line')}")
        found.setdefault(tries[at], []).append(n)
    return found


class Comparison:
    def __init__(self, args: argparse.Namespace, shape: Shape) -> None:
        self.args, self.shape = args, shape
        self.gpu = args.device == "cuda"
        self.cpus = len(os.sched_getaffinity(0))
        self.peer = Peer(args.llama, (args.llama, *cuda_libraries()))
        self.tokens = 4 if args.quick else 32
        machine = describe_machine(args.threads or spare_threads(self.cpus))
        machine["gpu"] = torch.cuda.get_device_name() if self.gpu else None
        self.threads = int(machine["threads"])
        self.data: dict[str, Any] = {"machine": machine, "versions": versions(self.peer)}
        self.data |= {"command": " ".join(["python -m benchmarks.gpu.llamacpp", *public(sys.argv[1:])])}
        self.data |= {"commit": args.commit or commit(), "layers": shape.layers, "sweep": {}, "results": []}

    def run(self, mix: str) -> None:
        model = model_path(self.args.models, self.shape.layers, mix)
        if not model.exists():
            print(f"writing {model.name} ...", flush=True)
            model.parent.mkdir(parents=True, exist_ok=True)
            write_model(model, self.shape, mix)
        rows, repeats = list(self.args.rows), 1 if self.args.quick else 3
        tries = candidates(self.cpus, self.gpu)
        print(f"{mix}: llama.cpp's flags, tok/s by rows", flush=True)
        lines = sweep(self.peer, model, tries, rows, max(2, self.tokens // 2))
        best = best_flags(tries, lines, rows)
        self.data["sweep"][mix] = {"tried": lines, "best": {str(flags): n for flags, n in best.items()}}
        ours: dict[int, list[float]] = {n: [] for n in rows}
        other: dict[int, list[float]] = {n: [] for n in rows}
        config = {"device": self.args.device, "expert_backend": "native", "pack_cache": "off"}
        config |= {"max_num_seqs": max(rows), "kv_cache_tokens": max(8192, 256 * max(rows))}
        engine = BenchEngine(model, self.shape, mix, self.threads, **config)
        print(f"{mix}: our engine loaded in {engine.load_s:.0f} s", flush=True)
        try:
            for i in range(repeats):
                for turn in ("ours", "peer") if i % 2 else ("peer", "ours"):
                    if turn == "ours":
                        for n in rows:
                            ours[n].append(n / engine.decode(n, self.tokens, PROMPT))
                        continue
                    for flags, counts in best.items():
                        for n, speed in self.peer.batched(model, flags, PROMPT, self.tokens, counts).items():
                            other[n].append(speed)
        finally:
            engine.close()
        for flags, counts in best.items():
            for n in counts:
                self._record(mix, n, str(flags), ours[n], other[n])

    def _record(self, mix: str, rows: int, flags: str, ours: list[float], other: list[float]) -> None:
        mine, theirs = statistics.median(ours), statistics.median(other)
        entry: dict[str, Any] = {"type": mix, "rows": rows, "ours_tok_s": mine, "llamacpp_tok_s": theirs}
        entry |= {"ratio": mine / theirs, "flags": flags, "all_ours": ours, "all_llamacpp": other}
        self.data["results"].append(entry)
        print(f"{mix:<7} {rows:>3} rows {mine:9.1f} tok/s   llama.cpp {theirs:9.1f}   x{mine / theirs:.2f}", flush=True)
        if self.args.out:
            self.args.out.parent.mkdir(parents=True, exist_ok=True)
            self.args.out.write_text(json.dumps(self.data, indent=1) + "\n")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder of the random models")
    parser.add_argument("--llama", type=Path, required=True, help="folder with llama-batched-bench and its libraries")
    parser.add_argument("--types", nargs="+", default=["Q8_0", "BF16"], choices=TYPES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, help="of ours; default: all CPUs but two")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="one short repetition: shows that it works")
    parser.add_argument("--commit", help="named in the results where git cannot tell")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def measure(args: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    began = time.monotonic()
    comparison = Comparison(args, shape)
    for mix in args.types:
        comparison.run(mix)
    print(f"{time.monotonic() - began:.0f} s")
    return comparison.data


def main() -> None:
    args = parse()
    try:
        measure(args, Shape(layers=args.layers))
    except PeerError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
