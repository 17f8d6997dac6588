"""Decode with a GPU: ours beside llama.cpp built with CUDA, on the same random GGUF files, in turn.

    python -m benchmarks.gpu.llamacpp --models DIR --llama BINARIES [--types Q4_K_M Q8_0 BF16]
                                      [--placements whole half layers cpu] [--rows 1 8 32] [--out FILE]

Eight layers of Qwen3-30B-A3B's shape, written to DIR if they are not there (Q4_K_M 3 GB, Q8_0 5.4 GB, BF16 10 GB).
Ours is the engine that `ktserve serve` builds with the placement's flags; llama.cpp keeps all layers on the GPU but the
experts that --n-cpu-moe leaves on the CPU:

whole   all experts on the GPU
half    half of the experts' bytes there: llama.cpp's are those of the last half of the layers, ours the hottest half of
        all (--gpu-experts); their hit rate is reported, since routing that is not even finds more of them
layers  the same, but ours are the same layers' as llama.cpp's
cpu     no experts there

A sweep over threads, flash attention, sizes of micro-batches, repacked weights and copies of experts to the GPU finds
llama.cpp's best flags for each number of rows. Then ours and its batched bench decode in turn, so many steps behind
prompts of --prompt tokens; tok/s are medians of the repetitions. Results are written after each, so that an
interrupted run keeps its tables. BINARIES holds llama-batched-bench and its libraries but cuBLAS, which is torch's.

--device cpu runs both without a GPU: to see that it works.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import rules
from benchmarks import record
from benchmarks.cpu.state import describe_machine, versions
from benchmarks.gpu.served import Served
from benchmarks.models.make import TYPES, made_model
from benchmarks.models.shapes import Shape
from benchmarks.peers.kt import spare_threads
from benchmarks.peers.llamacpp import Flags, Peer, PeerError
from benchmarks.settings import served_config
from engine.errors import UserError

PLACEMENTS = ("whole", "half", "layers", "cpu")


@dataclass(frozen=True)
class Placement:
    """Where experts are: the flags of `ktserve serve`, and how many of the first layers llama.cpp keeps on the CPU."""

    flags: tuple[str, ...]
    cpu_layers: int


def placement(name: str, shape: Shape, folder: Path) -> Placement:
    """One of PLACEMENTS; a file of rules that it needs is written to `folder`."""
    half = shape.layers // 2
    match name:
        case "whole":
            return Placement(("--gpu-experts", "all"), 0)
        case "half":
            return Placement(("--gpu-experts", str(shape.experts // 2)), half)
        case "layers":
            path = folder / f"experts-of-{half}-layers-on-the-cpu.yaml"
            path.write_text(first_layers_on_the_cpu(half))
            return Placement(("--rules", str(path)), half)
        case _:
            return Placement(("--gpu-experts", "none"), shape.layers)


def first_layers_on_the_cpu(layers: int) -> str:
    """Rules: all on the GPU but the experts of the first so many layers."""
    numbers = "|".join(map(str, range(layers)))
    first = f"""- match:
    name: "\\\\.({numbers})\\\\.mlp\\\\.experts$"
  replace:
    class: ktserve.experts.native
    kwargs:
      device: cpu
  recursive: false
"""
    return first + (Path(rules.__file__).parent / "gpu.yaml").read_text()


def cuda_libraries() -> list[Path]:
    """The folders of the CUDA libraries that torch has loaded into this process."""
    mapped = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libcu" in line]
    return sorted({Path(path).parent for path in mapped})


def candidates(cpus: int, gpu: bool, cpu_layers: int) -> list[Flags]:
    """The flags to try: changes of the default that experts on the CPU, or none, may make faster or slower."""
    start = Flags(cpus, gpu=gpu, cpu_layers=cpu_layers)
    found = [start, replace(start, threads=spare_threads(cpus)), replace(start, flash=False)]
    found.append(replace(start, ubatch=1024))
    if cpu_layers or not gpu:
        found.append(replace(start, repack=False))
    if cpu_layers and gpu:
        found.append(replace(start, offload=False))
        found.append(replace(start, repack=False, offload=False))
    return list(dict.fromkeys(found))


def sweep(
    peer: Peer, model: Path, tries: Sequence[Flags], prompt: int, rows: list[int], tokens: int
) -> list[dict[str, Any]]:
    """What each of the flags reaches at each number of rows; flags that fail are reported."""
    lines: list[dict[str, Any]] = []
    for flags in tries:
        try:
            speeds = peer.batched(model, flags, prompt, tokens, rows, warm=True)
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
        self.tokens, self.repeats = (4, 1) if args.quick else (64, 3)
        machine = describe_machine(args.threads or spare_threads(self.cpus))
        machine["gpu"] = torch.cuda.get_device_name() if self.gpu else None
        self.data: dict[str, Any] = {"machine": machine, "versions": versions(self.peer)}
        self.data |= {"layers": shape.layers, "prompt": args.prompt}
        self.data |= {"sweep": [], "results": []}
        self._best: dict[tuple[str, int], dict[Flags, list[int]]] = {}

    def model(self, mix: str) -> Path:
        return made_model(self.args.models, self.shape, mix)

    def best(self, mix: str, model: Path, cpu_layers: int) -> dict[Flags, list[int]]:
        """Of llama.cpp's flags, by the numbers of rows that they are the fastest at."""
        if (mix, cpu_layers) not in self._best:
            tries = candidates(self.cpus, self.gpu, cpu_layers)
            print(f"{mix}, experts of {cpu_layers} layers on the CPU: llama.cpp's flags, tok/s by rows", flush=True)
            lines = sweep(self.peer, model, tries, self.args.prompt, self.args.rows, max(2, self.tokens // 2))
            best = self._best[mix, cpu_layers] = best_flags(tries, lines, self.args.rows)
            entry = {"type": mix, "cpu_layers": cpu_layers, "tried": lines}
            self.data["sweep"].append(entry | {"best": {str(flags): rows for flags, rows in best.items()}})
        return self._best[mix, cpu_layers]

    def run(self, mix: str, name: str) -> None:
        model, where = self.model(mix), placement(name, self.shape, self.args.models)
        best = self.best(mix, model, where.cpu_layers)
        rows = max(self.args.rows)
        flags = ["--device", self.args.device, "--pack-cache", "off", "--max-num-seqs", str(rows)]
        flags += ["--kv-cache-tokens", str(max(8192, rows * (self.args.prompt + 4 * self.tokens)))]
        flags += where.flags if self.gpu else ()
        flags += ["--cpu-threads", str(self.args.threads)] if self.args.threads else []
        served = Served(served_config(model, flags), context=self.args.prompt)
        shown = " ".join(record.without_folders(flags))
        print(f"{mix}, {name}: ktserve serve MODEL {shown}, loaded in {served.loaded_s:.0f} s")
        print("\n".join(f"  {line}" for line in served.lines), flush=True)
        flags_at = {n: str(peers) for peers, counts in best.items() for n in counts}
        entries = {n: self._entry(mix, name, n, flags, flags_at[n]) for n in sorted(flags_at)}
        try:
            for n in entries:
                served.decode(n, steps=self.tokens)  # all kernels are compiled, hot experts known
            for turn in range(self.repeats):
                for whose in ("ours", "peer") if turn % 2 else ("peer", "ours"):
                    if whose == "ours":
                        self._ours(served, entries)
                        continue
                    for flags_of_peer, counts in best.items():
                        self._peers(model, flags_of_peer, {n: entries[n] for n in counts})
                self._tell(entries)
        finally:
            served.core.close()

    def _entry(self, mix: str, name: str, rows: int, ours: list[str], peers: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": mix, "placement": name, "rows": rows}
        entry |= {
            "flags": " ".join(record.without_folders(ours)),
            "llamacpp_flags": peers,
            "all_ours": [],
            "all_llamacpp": [],
        }
        self.data["results"].append(entry)
        return entry

    def _ours(self, served: Served, entries: dict[int, dict[str, Any]]) -> None:
        for n, entry in entries.items():
            before = served.expert_choices()
            entry["all_ours"].append(served.decode(n, steps=self.tokens)["engine_tok_s"])
            choices, hits = (now - then for now, then in zip(served.expert_choices(), before, strict=True))
            if choices:
                entry["gpu_hit_rate"] = hits / choices

    def _peers(self, model: Path, flags: Flags, entries: dict[int, dict[str, Any]]) -> None:
        speeds = self.peer.batched(model, flags, self.args.prompt, self.tokens, list(entries), warm=True)
        for n, entry in entries.items():
            entry["all_llamacpp"].append(speeds[n])

    def _tell(self, entries: dict[int, dict[str, Any]]) -> None:
        for entry in entries.values():
            ours, peers = (statistics.median(entry[key]) for key in ("all_ours", "all_llamacpp"))
            entry |= {"ours_tok_s": ours, "llamacpp_tok_s": peers, "ratio": ours / peers}
            print(row(entry), flush=True)
        if self.args.out:
            done = [entry for entry in self.data["results"] if "ratio" in entry]
            record.write(self.args.out, self.data | {"results": done})


HEAD = "| weights | experts | rows | ours, tok/s | llama.cpp | ratio | its flags |\n|---|---|---|---|---|---|---|"


def row(entry: dict[str, Any]) -> str:
    """A line of the table; HEAD is its head."""
    where = entry["placement"] + (f", {entry['gpu_hit_rate']:.0%} hits" if "gpu_hit_rate" in entry else "")
    cells = [entry["type"], where, str(entry["rows"]), f"{entry['ours_tok_s']:,.0f}", f"{entry['llamacpp_tok_s']:,.0f}"]
    return f"| {' | '.join([*cells, format(entry['ratio'], '.2f'), entry['llamacpp_flags']])} |"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder of the random models")
    parser.add_argument("--llama", type=Path, required=True, help="folder with llama-batched-bench and its libraries")
    parser.add_argument("--types", nargs="+", default=["Q4_K_M"], choices=TYPES)
    parser.add_argument("--placements", nargs="+", default=["whole", "half", "layers"], choices=PLACEMENTS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens before those that are timed")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, help="of ours; default: as `ktserve serve` chooses")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="one short repetition: shows that it works")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def measure(args: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """What --out gets. A placement that either side refuses is reported, and the others go on."""
    began = time.monotonic()
    comparison = Comparison(args, shape)
    for mix in args.types:
        for name in args.placements:
            try:
                comparison.run(mix, name)
            except (PeerError, UserError) as error:
                comparison.data.setdefault("failed", []).append({"type": mix, "placement": name, "error": str(error)})
                print(f"{mix}, {name}: {error}", flush=True)
            print(f"{time.monotonic() - began:.0f} s", flush=True)
    done = [entry for entry in comparison.data["results"] if "ratio" in entry]
    print("\n".join([HEAD, *map(row, done)]))
    return comparison.data | {"results": done}


def main() -> None:
    args = parse()
    if measure(args, Shape(layers=args.layers)).get("failed"):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
