"""Routed experts of one layer on a GPU, quantised as files have them, beside bf16: Qwen3-30B-A3B's shape, random bytes.

    python -m benchmarks.gpu.quantised [--formats q4_k q8_0 ...] [--rows 1 8 32 128 2048 8192] [--out FILE.json]

graph   us a layer in a CUDA graph of layers with weights of their own, so that no cache holds them; the speed over
        bf16's, and what reading the chosen experts takes at --gb-s
long    us of a chunk with its launches: weights made bf16 for each block of rows, and once for all (a chunk of 5120
        rows and more is computed so when served)

Experts are drawn evenly. Kernels are compiled first, format by format, which takes minutes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from engine.experts.base import ExpertBuffers
from engine.experts.gpu import widened
from engine.experts.gpu.compute import GpuCompute, LayerTables, SlotTables
from engine.experts.gpu.layout import ExpertLayout, Sizes

SIZES = Sizes(experts=128, top_k=8, hidden=2048, inner=768)
BF16, LAYERS, CALLS, REPEATS = torch.bfloat16, 4, 4, 6
FORMATS = {  # packed formats of gate, up and down
    "bf16": ("bf16",) * 3, "q8_0": ("i8",) * 3, "q6_k": ("k6",) * 3, "q5_k": ("k5",) * 3, "q4_k": ("k4",) * 3,
    "q4_k_m": ("k4", "k4", "k6"), "q4_0": ("i4",) * 3, "int4": ("z128",) * 3, "iq4_nl": ("n4",) * 3,
    "iq4_xs": ("x4",) * 3, "mxfp4": ("mx4",) * 3, "fp8": ("f8",) * 3,
}  # fmt: skip


class Layers:
    """Experts of so many layers and one batch for each. Bytes are below 60, which is a number in every format."""

    def __init__(self, form: str, rows: int, count: int, device: torch.device) -> None:
        self.layout = ExpertLayout.of(SIZES, FORMATS[form], BF16.itemsize)
        place = torch.arange(SIZES.experts, dtype=torch.int32, device=device).repeat(2, 1)
        address = torch.zeros(2, SIZES.experts, dtype=torch.int64, device=device)
        self._slots = SlotTables.allocate(count, 2, device)
        self._compute = GpuCompute(SIZES, BF16, device, max_rows=rows, max_rank=16, max_slots=1)
        self._steps: list[tuple[ExpertBuffers, LayerTables]] = []
        for layer in range(count):
            size = SIZES.experts, self.layout.num_bytes
            expert_slots = torch.randint(0, 60, size, dtype=torch.uint8, device=device)
            self._steps.append((batch(rows, layer, device), LayerTables(expert_slots, place, address, self.layout)))

    def run(self) -> None:
        for layer, (b, tables) in enumerate(self._steps):
            self._compute.run(b, tables, self._slots, layer, b.out, lora=False)

    @property
    def chosen_bytes(self) -> float:
        """Of a layer, on average."""
        distinct = statistics.mean(float(torch.unique(b.ids).numel()) for b, _ in self._steps)
        return distinct * self.layout.num_bytes


def batch(rows: int, seed: int, device: torch.device) -> ExpertBuffers:
    b = ExpertBuffers.allocate(rows, SIZES.top_k, SIZES.hidden, BF16, device=device)
    chosen = torch.rand(rows, SIZES.experts, generator=torch.Generator().manual_seed(seed)).topk(SIZES.top_k)
    b.ids.copy_(chosen.indices)
    b.hidden.normal_()
    b.weights.fill_(1 / SIZES.top_k)
    b.bsz.fill_(rows)
    return b


def least_us(run: Callable[[], object], calls: int) -> float:
    """Of a call, the fastest of some repetitions."""
    found: list[float] = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / calls * 1e3)
    return min(found)


def in_graph(form: str, rows: int, device: torch.device, gb_s: float) -> dict[str, Any]:
    layers = Layers(form, rows, LAYERS, device)
    layers.run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers.run()
    us = least_us(graph.replay, CALLS) / LAYERS
    return {"us": round(us, 1), "roof_us": round(layers.chosen_bytes / gb_s / 1e3, 1)}


def long_chunk(form: str, rows: int, device: torch.device) -> dict[str, float]:
    found = {}
    kept = widened.ROWS
    try:
        for name, least in (("by blocks", 1 << 30), ("once", 0)):
            widened.ROWS = least
            layers = Layers(form, rows, 1, device)
            layers.run()
            found[name] = round(least_us(layers.run, 2), 1)
    finally:
        widened.ROWS = kept
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 2048, 8192])
    parser.add_argument("--long", type=int, nargs="*", default=[4096, 8192], help="rows of long chunks")
    parser.add_argument("--gb-s", type=float, default=4000.0, help="the GPU's read bandwidth")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no NVIDIA GPU here")
    device = torch.device("cuda")
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": {}}
    found = results["results"]
    for form in dict.fromkeys(["bf16", *args.formats]):
        for rows in args.rows:
            row = found[f"{form} {rows}"] = in_graph(form, rows, device, args.gb_s)
            row["over_bf16"] = round(found[f"bf16 {rows}"]["us"] / row["us"], 2)
            print(f"{form:8} {rows:5} rows: {row}", flush=True)
        for rows in args.long if form != "bf16" else []:
            row = found[f"{form} {rows} long"] = long_chunk(form, rows, device)
            print(f"{form:8} {rows:5} rows, long: {row}", flush=True)
        if args.out:
            record.write(args.out, results)


if __name__ == "__main__":
    main()
