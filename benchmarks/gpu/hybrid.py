"""Experts shared between the CPU and a GPU, as `ktserve serve` builds it, under routing that is known.

    python -m benchmarks.gpu.hybrid [--layers 8] [--share 0.5] [--rows 1 8 32] [--zipf 1.1] [--out FILE.json]
                                    [--dry] [--serve="--quantise int8"]

A random model of Qwen3-30B-A3B's shape is served with its experts on the CPU, shared (`--gpu-experts`) and on the GPU,
in turn. Its own routers would choose nearly evenly, so what they chose is replaced by draws before each expert call:
evenly spread ones, and draws by weights rank^-zipf over an order of the experts that each layer has of its own. All
else is a server's step: scheduling, messages, graphs, moves of experts.

ms         of a step, one ahead as served; `speedup`: the CPU's over the shared one's, `best`: the better of the others'
           over the shared one's
experts    the same without what a step takes whose experts are all on the GPU (`speedup_experts`)
hits       choices whose expert was on the GPU
changed    steps after the hot experts became others: their mean by tens, the longest, and how many until 1.1 times the
           time before
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.gpu.served import Served
from benchmarks.models.folder import write_folder
from benchmarks.models.random import DRY
from benchmarks.settings import served_config
from engine.experts.base import ExpertBackend, ExpertBuffers, ExpertTask
from engine.experts.capabilities import ExpertPlaces
from engine.experts.stream import on_stream
from engine.lora.adapter import ExpertLora
from engine.model.mlp import SparseMlp
from engine.model.native_executor import choose_executor
from engine.weights.store import ExpertStore
from testing.harness import model_runner

DRAWS = 512  # of the routing, before they come again
WARM_STEPS = 256  # of the shared experts, from those of the routing before
SETTLE = 1.1  # times a step's time, from which a change is over


def draws(shape: tuple[int, int, int], experts: int, top_k: int, zipf: float, seed: int) -> torch.Tensor:
    """int64 [*shape, top_k] for `shape` (draws, layers, rows): distinct experts by weights rank^-zipf (0: evenly)."""
    g = torch.Generator().manual_seed(seed)
    ranks = torch.stack([torch.randperm(experts, generator=g) for _ in range(shape[1])]) + 1.0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = (-zipf * ranks.log()).to(device)[:, None]
    noise = torch.Generator(device).manual_seed(seed)

    def draw() -> torch.Tensor:
        """The largest of log-weights plus Gumbel noise are a draw without repetition."""
        uniform = torch.rand(*shape[1:], experts, device=device, generator=noise)
        return (weights - (-uniform.log()).log()).topk(top_k).indices

    return torch.stack([draw() for _ in range(shape[0])])


class Routed(ExpertBackend):
    """`inner`, for steps of up to so many rows with drawn choices, other ones in each step."""

    def __init__(self, inner: ExpertBackend, layers: list[int], buffers: ExpertBuffers, rows: int) -> None:
        self.inner = inner
        self.buffers_on, self.follows_stream = inner.buffers_on, inner.follows_stream
        self._numbers = {layer: number for number, layer in enumerate(layers)}
        self._rows = rows
        self._device = buffers.ids.device
        self._now = torch.zeros(len(layers), rows, buffers.ids.shape[1], dtype=torch.int64, device=self._device)
        self._draws = self._now[None]
        self._step = 0
        self._active = False

    def deal(self, draws: torch.Tensor) -> None:
        """int64 [draws, layers, rows, top_k]: those of the steps to come, in turn."""
        self._draws, self._step = draws.to(self._device), 0

    @property
    def offers(self) -> tuple[object, ...]:
        places = self.inner.capability(ExpertPlaces)
        return () if places is None else (places,)

    def load_layer(self, layer: int, store: ExpertStore) -> None:
        self.inner.load_layer(layer, store)

    def set_adapter(self, slot: int, layers: dict[int, ExpertLora] | None) -> None:
        self.inner.set_adapter(slot, layers)

    def bind(self, layer: int, buffers: ExpertBuffers) -> ExpertTask:
        return self.inner.bind(layer, buffers)

    def begin_step(self, rows: int, *, lora: bool, eager: bool, slots: Any = None) -> None:
        self._active = rows <= self._rows
        if 0 < rows <= self._rows:
            self._now.copy_(self._draws[self._step % len(self._draws)])
            self._step += 1
        self.inner.begin_step(rows, lora=lora, eager=eager, slots=slots)

    def prefetch(self) -> None:
        self.inner.prefetch()

    def post(self, task: ExpertTask, stream: Any = None) -> None:
        if self._active:
            some = min(task.buffers.launch_rows, self._rows)
            with on_stream(stream, self._device):
                task.buffers.ids[:some].copy_(self._now[self._numbers[task.layer], :some])
        self.inner.post(task, stream)

    def wait(self, task: ExpertTask, stream: Any = None) -> None:
        self.inner.wait(task, stream)

    def check(self) -> None:
        self.inner.check()

    def close(self) -> None:
        self.inner.close()


class Bench:
    """An engine of `ktserve serve` whose choices are drawn; steps of up to `rows` rows."""

    def __init__(self, model: Path, flags: list[str], rows: int) -> None:
        self.served = Served(served_config(model, [*flags, "--max-num-seqs", str(rows), "--pack-cache", "off"]))
        self.rows = rows
        core = self.served.core
        runner = model_runner(core)
        c = self.config = runner.model.config
        mlps = [layer.mlp for layer in runner.model.layers if isinstance(layer.mlp, SparseMlp)]
        self.routed = Routed(mlps[0].backend, c.sparse_layers, mlps[0].task.buffers, rows)
        for mlp in mlps:
            mlp.backend = self.routed
        runner.model.expert_backends = [self.routed]
        runner.executor = choose_executor(runner.model)
        if runner.padded is not None:  # the graphs hold the routers' choices
            made = runner.pad_decode(rows, 0, core.scheduler.config.num_blocks)
            with runner.computing():
                made.capture(lambda *_: None)

    def deal(self, zipf: float, seed: int) -> None:
        c = self.config
        shape = (DRAWS, len(c.sparse_layers), self.rows)
        self.routed.deal(draws(shape, c.num_experts, c.num_experts_per_tok, zipf, seed))

    def hits(self) -> tuple[int, int]:
        """(choices so far, those whose expert was on the GPU)"""
        places = self.routed.capability(ExpertPlaces)
        return (0, 0) if places is None or places.choices is None else places.choices()

    def steps(self, seconds: float, least: int, most: int = 1500) -> list[float]:
        """Seconds of each step of what is running."""
        times: list[float] = []
        begun = last = time.perf_counter()
        while len(times) < least or (last - begun < seconds and len(times) < most):
            self.served.step()
            now = time.perf_counter()
            times.append(now - last)
            last = now
        return times

    def decode(self, rows: int, zipf: float, seconds: float, warm: int) -> dict[str, Any]:
        """Steps of so many rows, behind `warm` of them."""
        self.deal(zipf, 1)
        with self.served.running(rows):
            self.steps(0, warm)
            before = self.hits()
            times = self.steps(seconds, 16)
            after = self.hits()
            found: dict[str, Any] = {"ms": statistics.mean(times) * 1e3, "longest_ms": max(times) * 1e3}
            if after[0] > before[0]:
                found["hits"] = (after[1] - before[1]) / (after[0] - before[0])
            if zipf and warm > 16:
                found["changed"] = self._changed(zipf, found["ms"], warm)
        return found

    def _changed(self, zipf: float, settled_ms: float, count: int) -> dict[str, Any]:
        self.deal(zipf, 2)
        ms = [s * 1e3 for s in self.steps(0, count)]
        tens = [statistics.mean(ms[i : i + 10]) for i in range(0, len(ms) - 9, 10)]
        until = next((10 * i for i, mean in enumerate(tens) if mean <= SETTLE * settled_ms), None)
        return {"tens_ms": tens, "longest_ms": max(ms), "settled_after": until}


def compare(rows: int, zipf: float, cpu: dict[str, Any], shared: dict[str, Any], gpu: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"rows": rows, "zipf": zipf, "cpu_ms": cpu["ms"], "gpu_ms": gpu["ms"]}
    row |= {("shared_" if name.endswith("ms") else "") + name: value for name, value in shared.items()}
    left, own = cpu["ms"] - gpu["ms"], shared["ms"] - gpu["ms"]
    row |= {"speedup": cpu["ms"] / shared["ms"], "speedup_experts": left / own if own > 0 else math.inf}
    return row | {"best": min(cpu["ms"], gpu["ms"]) / shared["ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the random model; it is written if it is not there")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.5, help="of each layer's experts on the GPU")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--zipf", type=float, default=1.1, help="exponent of the skewed draws")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--dry", action="store_true", help="a small model, three times on the CPU: shows that it works")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", type=shlex.split, default=[], help="flags of `ktserve serve`, in one argument")
    args = parser.parse_args()
    share = str(round(args.share * (DRY if args.dry else {"num_experts": 128})["num_experts"]))
    kinds = {"cpu": ["--gpu-experts", "none"], "gpu": ["--gpu-experts", "all"], "shared": ["--gpu-experts", share]}
    if args.dry:
        kinds = {kind: ["--device", "cpu", "--cpu-threads", "1", "--kv-cache-tokens", "32768"] for kind in kinds}
    found: dict[tuple[str, float, int], dict[str, Any]] = {}
    about: dict[str, Any] = {"layers": args.layers, "share": args.share, "flags": args.serve}
    about["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    with tempfile.TemporaryDirectory(prefix="ktserve-bench-") as temporary:
        changes = {"num_hidden_layers": args.layers, **(DRY if args.dry else {})}
        model = write_folder(args.model or Path(temporary) / "model", changes)
        for kind, flags in kinds.items():
            bench = Bench(model, [*flags, "--max-adapter-slots", "0", *args.serve], max(args.rows))
            print(f"{kind}: loaded in {bench.served.loaded_s:.0f} s, {' '.join(flags)}", flush=True)
            about[kind] = bench.served.lines
            warm = (8 if args.dry else WARM_STEPS) if kind == "shared" else 8
            for zipf in (0.0, args.zipf):
                for rows in args.rows:
                    found[kind, zipf, rows] = bench.decode(rows, zipf, args.seconds, warm)
                    print(f"  {kind} zipf {zipf} rows {rows}: {json.dumps(found[kind, zipf, rows])}", flush=True)
            bench.served.core.close()
    results = [
        compare(rows, zipf, *(found[kind, zipf, rows] for kind in ("cpu", "shared", "gpu")))
        for zipf in (0.0, args.zipf)
        for rows in args.rows
    ]
    for row in results:
        print(json.dumps({name: value for name, value in row.items() if name != "changed"}), flush=True)
    if args.out:
        record.write(args.out, {"about": about, "results": results})


if __name__ == "__main__":
    main()
