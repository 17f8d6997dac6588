"""Layers of Qwen3-30B-A3B's experts, per packed format and number of rows: share of the peaks measured just before.

python -m benchmarks.kernels.experts [--threads N] [--isa avx2] [--types BF16 Q8_0] [--rows 1 8] [--adapters 4]
                                   [--peer] [--json FILE]

Rows choose experts uniformly at random (up to 16 choices: without repetition from call to call). Enough layers are
visited in turn that more than four times the last-level cache is read before an expert comes again. Bytes are those
of the distinct experts chosen (weights only), operations those of their products; the bound is the longer of reading
the former and computing the latter. --peer: kt_kernel's class of the same precision, turn by turn with ours, the
faster of two settings of K_CFG.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import math
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.kernels.probe import Peaks, arguments, best_s, line, make_pool, measure_peaks
from benchmarks.models.blocks import random_bytes
from benchmarks.peers.kt import KtPeer, Variant, spare_threads, variants
from engine.experts.base import ExpertBuffers

_native: Any = importlib.import_module("native._native")

HIDDEN, INTERMEDIATE, TOP_K = 2048, 768, 8
RANK = 16
MIXES = {"Q4_K_M": ("Q4_K", "Q4_K", "Q6_K")}  # the half of its layers whose down is Q6_K
ALTERNATIONS = 3


def cache_bytes() -> int:
    """The last-level caches of this process's CPUs."""
    sizes = {}
    for cpu in os.sched_getaffinity(0):
        folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/cache/index3")
        try:
            sizes[(folder / "shared_cpu_list").read_text()] = int((folder / "size").read_text().strip("K\n")) << 10
        except OSError:
            return 512 << 20
    return sum(sizes.values())


def layers_beyond_cache(layer: Any, caches: int = 4) -> int:
    """Eight rows choose 40% of 128 experts: so many layers that those of all exceed so many last-level caches."""
    return math.ceil(caches * cache_bytes() / (0.4 * float(layer.num_bytes)))


def make_layer(
    pool: Any, type: str, experts: int, adapters: int, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE
) -> Any:
    """A layer whose experts all hold the same random values, each in memory of its own."""
    types = MIXES.get(type, (type, type, type))
    forms = [_native.format_of(t) for t in types]
    layer = _native.ExpertLayer(experts, hidden, intermediate, forms, pool.groups)
    for projection, kind in enumerate(types):
        n, k = (hidden, intermediate) if projection == 2 else (intermediate, hidden)
        data = random_bytes(kind, n, k)
        layer.load(pool, projection, kind, 0, [data.ctypes.data] * experts)
    for slot in range(1, adapters + 1):
        a = [torch.randn(experts, RANK, k).bfloat16() for k in (hidden, hidden, intermediate)]
        b = [torch.randn(experts, n, RANK).bfloat16() for n in (intermediate, intermediate, hidden)]
        layer.set_lora(pool, slot, RANK, True, [t.data_ptr() for t in a], [t.data_ptr() for t in b], [1.0] * 3)
    return layer


def choices(rows: int, experts: int, layers: int, top_k: int = TOP_K) -> list[torch.Tensor]:
    """Expert ids [rows, top_k] of consecutive calls, the layers in turn."""
    g = torch.Generator().manual_seed(rows)
    if rows * top_k <= 16 and rows * top_k <= experts:
        fit = experts // (rows * top_k)
        orders = [torch.randperm(experts, generator=g) for _ in range(layers)]
        return [order[i * rows * top_k :][: rows * top_k].reshape(rows, top_k) for i in range(fit) for order in orders]
    calls = layers * max(1, min(8, 256 // rows))
    return [torch.rand(rows, experts, generator=g).topk(top_k).indices for _ in range(calls)]


def make_task(
    runner: Any, layer: Any, ids: torch.Tensor, adapters: int, hidden: int = HIDDEN
) -> tuple[Any, ExpertBuffers]:
    rows, top_k = ids.shape
    b = ExpertBuffers.allocate(rows, top_k, hidden, torch.bfloat16)
    b.bsz[0] = rows
    b.hidden.copy_(torch.randn(rows, hidden))
    b.ids.copy_(ids)
    b.weights.fill_(1 / top_k)
    if adapters:
        b.slots.copy_(torch.arange(rows) % adapters + 1)
    names = ("bsz", "ids", "weights", "slots", "hidden", "out")
    pointers = {name: getattr(b, name).data_ptr() for name in names}
    return _native.MoeTask(runner, layer, **pointers, max_rows=rows, top_k=top_k, bf16=True), b


class Bench:
    def __init__(self, args: Any) -> None:
        self.args = args
        self.pool = make_pool(args.threads)
        self.runner = _native.MoeRunner(self.pool, args.isa)
        self.results: list[dict[str, Any]] = []

    def type(self, type: str) -> None:
        args = self.args
        experts = args.experts
        first = make_layer(self.pool, type, experts, args.adapters)
        count = args.layers or layers_beyond_cache(first)
        layers = [first] + [make_layer(self.pool, type, experts, args.adapters) for _ in range(count - 1)]
        peer = None
        if args.peer and (wanted := variants(type, TOP_K)):
            shape = (experts, TOP_K, HIDDEN, INTERMEDIATE)
            peer = KtPeer(wanted, shape, count, max(args.rows), args.peer_threads)
        peaks = measure_peaks(self.pool, args.isa)
        print(f"{type}: {count} layers of {first.num_bytes / 1e6:.0f} MB; {peaks}", flush=True)
        for rows in args.rows:
            self.rows(type, layers, rows, peaks, peer)
        if peer:
            peer.close()

    def rows(self, type: str, layers: list[Any], rows: int, peaks: Peaks, peer: KtPeer | None) -> None:
        args = self.args
        ids = choices(rows, args.experts, len(layers))
        made = [
            make_task(self.runner, layer, i, args.adapters)
            for layer, i in zip(itertools.cycle(layers), ids, strict=False)
        ]
        run = each([task for task, _ in made])
        seconds, theirs = math.inf, dict[Variant, float]()
        for _ in range(ALTERNATIONS if peer else 1):
            seconds = min(seconds, best_s(self.pool, args.repeats, run) / len(made))
            if peer:
                for variant, s in peer.best_s(ids, args.repeats).items():
                    theirs[variant] = min(s, theirs.get(variant, math.inf))
        distinct = sum(len(set(i.flatten().tolist())) for i in ids) / len(ids)
        num_bytes = distinct * layers[0].num_bytes / args.experts
        operations = 2.0 * rows * TOP_K * 3 * HIDDEN * INTERMEDIATE
        kind = "bf16" if type == "BF16" else "int8"
        bound = max(num_bytes / peaks.bytes_per_s, operations / peaks.of(kind))
        text = line(f"{type} x {rows} rows", seconds, num_bytes, operations, peaks, kind)
        result = {
            "type": type, "rows": rows, "us": seconds * 1e6, "GB_s": num_bytes / seconds / 1e9,
            "Gop_s": operations / seconds / 1e9, "of_read": num_bytes / seconds / peaks.bytes_per_s,
            "of_peak": operations / seconds / peaks.of(kind), "of_bound": bound / seconds, "peaks": vars(peaks),
        }  # fmt: skip
        if theirs:
            best = min(theirs, key=lambda variant: theirs[variant])
            result |= {"peer_us": {str(v.k_cfg): s * 1e6 for v, s in theirs.items()}, "ratio": theirs[best] / seconds}
            text += f"  kt {theirs[best] * 1e6:.0f} us (K_CFG {best.k_cfg}): {theirs[best] / seconds:.2f}x"
        print(text, flush=True)
        self.results.append({k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()})
        if args.json:
            record.write(args.json, self.describe() | {"results": self.results})

    def describe(self) -> dict[str, Any]:
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        if self.args.peer:
            versions["kt-kernel"] = importlib.metadata.version("kt-kernel")
        return {
            "what": "routed experts of one layer, hidden 2048, intermediate 768, 128 experts, top-8",
            "machine": {
                "cpus": len(os.sched_getaffinity(0)),
                "threads": self.args.threads, "peer_threads": self.args.peer_threads,
                "cache_bytes": cache_bytes(), "isa": self.runner.isa,
            },
            "versions": versions,
        }  # fmt: skip


def each(tasks: list[Any]) -> Callable[[], None]:
    def run() -> None:
        for task in tasks:
            task.run()

    return run


def main() -> None:
    parser = arguments(__doc__ or "")
    cpus = len(os.sched_getaffinity(0))
    parser.set_defaults(threads=cpus - 2 if cpus > 4 else cpus)
    parser.add_argument("--types", nargs="+", default=["BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q4_K_M"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 512, 1024, 4096])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--layers", type=int, help="default: more than four last-level caches of weights")
    parser.add_argument("--adapters", type=int, default=0, help=f"rows are spread over so many rank-{RANK} adapters")
    parser.add_argument("--peer", action="store_true", help="time kt_kernel beside; its threads need CPUs to spare")
    parser.add_argument("--peer-threads", type=int, default=spare_threads(cpus))
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(args)
    for type in args.types:
        bench.type(type)


if __name__ == "__main__":
    main()
