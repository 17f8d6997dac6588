"""Routed experts beside and on a GPU, at Qwen3-30B-A3B's shape with random weights; a CUDA graph over all layers.

python -m benchmarks.gpu.experts [--layers 8] [--quantise int8] [--out FILE.json] [handshake decode gpu hybrid prefill]

handshake  post + wait per layer with no rows, and with rows whose experts are all elsewhere (copies both ways)
decode     experts on the CPU by the bridge: ms a layer, beside the same task without a GPU, GB/s, adapters
gpu        all experts on the GPU
hybrid     part of the experts on the GPU, zipf-like routing
prefill    one chunk through the CPU, streamed to the GPU, and by the automatic choice

Bytes are those of the distinct experts chosen. Layers have weights of their own, so that no cache holds them.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.models.configs import QWEN3_30B_A3B
from benchmarks.models.random import LORA_RANK, expert_bytes, random_lora, random_store
from engine.architectures.config import ModelConfig
from engine.architectures.registry import config_from_hf
from engine.experts.base import ExpertBackend, ExpertBuffers, ExpertTask
from engine.experts.bridge.backend import CudaBridge
from engine.experts.gpu.backend import GpuExperts
from engine.experts.hybrid.backend import HybridExperts
from engine.experts.native import NativeExperts
from engine.experts.streamed.backend import NEVER, StreamedExperts
from native import _native
from native.topology import make_pool

BF16 = torch.bfloat16
CUDA = torch.device("cuda")
WARM_STEPS = 160  # of the hybrid, from nothing on the GPU


def zipf_ids(config: ModelConfig, rows: int, layer: int, exponent: float, draw: int = 0) -> torch.Tensor:
    """[rows, k] distinct experts; weights rank^-exponent over a permutation of the layer's own. 0 is uniform."""
    g = torch.Generator().manual_seed(layer)
    weights = (torch.randperm(config.num_experts, generator=g) + 1.0) ** -exponent
    g.manual_seed(1000 * draw + layer)
    return torch.multinomial(weights.expand(rows, -1), config.num_experts_per_tok, generator=g)


class Step:
    """Device buffers and routing for all layers; `run` is one step's expert calls."""

    def __init__(
        self,
        config: ModelConfig,
        layers: int,
        rows: int,
        exponent: float = 0.0,
        adapters: int = 0,
        device: torch.device = CUDA,
    ) -> None:
        self.config, self.layers, self.rows = config, layers, rows
        self.buffers = ExpertBuffers.allocate(rows, config.num_experts_per_tok, config.hidden_size, BF16, device=device)
        self.buffers.bsz.fill_(rows)
        self.buffers.hidden.normal_()
        self.buffers.weights.fill_(1 / config.num_experts_per_tok)
        if adapters:
            self.buffers.slots.copy_(torch.arange(rows) % adapters + 1)
        self.exponent = exponent
        self.ids = torch.zeros(layers, rows, config.num_experts_per_tok, dtype=torch.int64, device=device)
        self.draw(0)

    def draw(self, number: int) -> None:
        ids = [zipf_ids(self.config, self.rows, layer, self.exponent, number) for layer in range(self.layers)]
        self.ids.copy_(torch.stack(ids))

    @property
    def distinct(self) -> float:
        """Experts that a layer touches."""
        return float(statistics.mean(ids.unique().numel() for ids in self.ids.cpu()))

    def tasks(self, backend: ExpertBackend) -> list[ExpertTask]:
        return [backend.bind(layer, self.buffers) for layer in range(self.layers)]

    def copy_ids(self) -> None:
        """What `run` does beside the expert calls."""
        for ids in self.ids:
            self.buffers.ids.copy_(ids)

    def run(self, backend: ExpertBackend, tasks: list[ExpertTask]) -> None:
        for task, ids in zip(tasks, self.ids, strict=True):
            self.buffers.ids.copy_(ids)
            backend.post(task)
            backend.wait(task)


def capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def median_ms(
    backend: ExpertBackend, rows: int, run: Callable[[], None], repeats: int, *, eager: bool = False, warm_up: int = 2
) -> float:
    times: list[float] = []
    cuda: Any = torch.cuda
    for number in range(repeats + warm_up):
        backend.begin_step(rows, lora=False, eager=eager)
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin.record()
        backend.prefetch()
        run()
        end.record()
        end.synchronize()
        backend.check()
        if number >= warm_up:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def graph_ms(backend: ExpertBackend, step: Step, lora: bool, repeats: int) -> float:
    tasks = step.tasks(backend)
    backend.begin_step(step.rows, lora=lora, eager=True)
    step.run(backend, tasks)
    torch.cuda.synchronize()
    backend.check()
    backend.begin_step(step.rows, lora=lora, eager=False)
    graph = capture(lambda: step.run(backend, tasks))
    backend.check()
    return median_ms(backend, step.rows, graph.replay, repeats)


def cpu_ms(
    native: NativeExperts, config: ModelConfig, layers: int, rows: int, repeats: int, fill: int | None = None
) -> float:
    """ms a layer of the same tasks without a GPU. `fill`: every choice, instead of a draw for each layer."""
    pin = torch.cuda.is_available()
    b = ExpertBuffers.allocate(rows, config.num_experts_per_tok, config.hidden_size, BF16, pin=pin)
    b.bsz[0] = rows
    b.hidden.normal_()
    b.weights.fill_(1 / config.num_experts_per_tok)
    tasks = [native.bind(layer, b) for layer in range(layers)]
    times = []
    for draw in range(repeats + 1):
        native.pool.begin_step()
        total = 0.0
        for layer, task in enumerate(tasks):
            b.ids.copy_(zipf_ids(config, rows, layer, 0.0) if fill is None else torch.full_like(b.ids, fill))
            began = time.perf_counter()
            native.post(task)
            native.wait(task)
            total += time.perf_counter() - began
        native.pool.end_step()
        if draw:
            times.append(total)
    return statistics.median(times) * 1e3 / layers


class Bench:
    def __init__(self, layers: int, repeats: int, quantise: str | None) -> None:
        self.config = config_from_hf({**QWEN3_30B_A3B, "num_hidden_layers": layers})
        self.layers, self.repeats = layers, repeats
        self.pool: Any = make_pool()
        self.peak = float(_native.read_bandwidth(self.pool, 4 << 30, repeats=3, isa=""))
        self.native = NativeExperts(self.config, BF16, self.pool, quantise=quantise)
        self.expert_bytes = expert_bytes(self.config)
        self.cpu_bytes = expert_bytes(self.config, quantise)
        self.results: dict[str, Any] = {}
        self.machine: dict[str, Any] = {
            "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "isa": self.native.isa,
            "threads": self.pool.threads, "layers": layers, "quantise": quantise,
            "read_GB_s": round(self.peak / 1e9, 1),
        }  # fmt: skip
        self._load()
        self.bridge = CudaBridge(self.native, self.config, CUDA)

    def _load(self) -> None:
        began = time.perf_counter()
        for layer in range(self.layers):
            self.native.load_layer(layer, random_store(layer, self.config))
        self.machine["load_s"] = round(time.perf_counter() - began, 1)

    def say(self, section: str, key: str, **values: float) -> None:
        row = {name: round(value, 4) for name, value in values.items()}
        self.results.setdefault(section, {})[key] = row
        print(f"{section:10} {key:24}", *(f"{name} {value:g}" for name, value in row.items()), flush=True)

    def handshake(self) -> None:
        for rows, empty in ((1, True), (1, False), (32, False), (128, False)):
            step = Step(self.config, self.layers, rows)
            step.ids.fill_(-1)
            if empty:
                step.buffers.bsz.fill_(0)
            ms = graph_ms(self.bridge, step, False, self.repeats)
            copies = capture(step.copy_ids)
            own = median_ms(self.bridge, rows, copies.replay, self.repeats)
            self.say("handshake", "no rows" if empty else f"{rows} rows, no experts", us=(ms - own) * 1e3 / self.layers)
        for rows in (1, 32, 128):
            self.say("handshake", f"pool alone, {rows} rows", us=self._cpu_ms(rows, -1) * 1e3)

    def _cpu_ms(self, rows: int, fill: int | None = None) -> float:
        return cpu_ms(self.native, self.config, self.layers, rows, self.repeats, fill)

    def decode(self, all_rows: list[int]) -> None:
        for rows in all_rows:
            step = Step(self.config, self.layers, rows)
            ms = graph_ms(self.bridge, step, False, self.repeats) / self.layers
            cpu = self._cpu_ms(rows)
            peak = step.distinct * self.cpu_bytes / self.peak * 1e3
            self.say(
                "decode", f"{rows} rows", ms=ms, cpu_ms=cpu, over_peak=ms / peak,
                GB_s=step.distinct * self.cpu_bytes / ms / 1e6, tok_s=rows / (ms * 48) * 1e3,
            )  # fmt: skip
        lora = random_lora(self.config)
        for slot in range(1, 17):
            self.bridge.set_adapter(slot, dict.fromkeys(range(self.layers), lora))
        base = Step(self.config, self.layers, 32)
        many = Step(self.config, self.layers, 32, adapters=16)
        base_ms = graph_ms(self.bridge, base, False, self.repeats) / self.layers
        many_ms = graph_ms(self.bridge, many, True, self.repeats) / self.layers
        self.say("decode", "32 rows, 16 adapters", ms=many_ms, base_ms=base_ms, ratio=base_ms / many_ms)
        for slot in range(1, 17):
            self.bridge.set_adapter(slot, None)

    def gpu(self, all_rows: list[int]) -> None:
        count = min(self.layers, 8)
        backend = GpuExperts(self.config, BF16, CUDA, max_rows=max(all_rows), max_slots=16, max_rank=LORA_RANK)
        for layer in range(count):
            backend.load_layer(layer, random_store(layer, self.config))
        lora = random_lora(self.config)
        for rows in all_rows:
            step = Step(self.config, count, rows)
            ms = graph_ms(backend, step, False, self.repeats) / count
            bytes_ = step.distinct * self.expert_bytes
            operations = 2 * rows * self.config.num_experts_per_tok * self.expert_bytes / 2
            self.say("gpu", f"{rows} rows", ms=ms, TB_s=bytes_ / ms / 1e9, TFLOP_s=operations / ms / 1e9)
        for slot in range(1, 5):
            backend.set_adapter(slot, dict.fromkeys(range(count), lora))
        for rows in (32, max(all_rows)):
            step = Step(self.config, count, rows, adapters=4)
            self.say("gpu", f"{rows} rows, 4 adapters", ms=graph_ms(backend, step, True, self.repeats) / count)
        del backend
        gc.collect()
        torch.cuda.empty_cache()

    def hybrid(self, shares: list[float], all_rows: list[int], exponent: float) -> None:
        total = self.layers * self.config.num_experts
        for share in shares:
            backend = HybridExperts(
                self.bridge, self.config, BF16, CUDA, budget_bytes=int(share * total) * self.expert_bytes,
                max_rows=max(all_rows), max_slots=4, max_rank=LORA_RANK,
            )  # fmt: skip
            for layer in range(self.layers):
                backend.parts.source.add(layer)
            for rows in all_rows:
                self._hybrid_rows(backend, share, Step(self.config, self.layers, rows, exponent))
            backend.parts.source.close()
            del backend
            gc.collect()
            torch.cuda.empty_cache()

    def _hybrid_rows(self, backend: HybridExperts, share: float, step: Step) -> None:
        """Every step has a routing of its own."""
        cpu = self._drawn_ms(self.bridge, step, 0)
        ms, hits = self._drawn_ms(backend, step, WARM_STEPS), []
        for number in range(self.repeats):
            step.draw(number)
            place = torch.stack([backend.place(layer) for layer in range(self.layers)]).cpu()
            here = place[:, None, :].expand(-1, step.rows, -1).gather(2, step.ids.cpu()) >= 0
            hits.append(float(here.float().mean()))
        self.say(
            "hybrid", f"{share:.0%} on the GPU, {step.rows} rows", ms=ms, cpu_only_ms=cpu, speedup=cpu / ms,
            hit_rate=statistics.mean(hits),
        )  # fmt: skip

    def _drawn_ms(self, backend: ExpertBackend, step: Step, warm_up: int) -> float:
        tasks = step.tasks(backend)
        backend.begin_step(0, lora=False, eager=False)
        step.run(backend, tasks)
        torch.cuda.synchronize()
        graph, times = capture(lambda: step.run(backend, tasks)), []
        for number in range(warm_up + self.repeats + 2):
            step.draw(number)
            times.append(median_ms(backend, step.rows, graph.replay, 1, warm_up=0))
        return statistics.median(times[warm_up + 2 :]) / self.layers

    def prefill(self, all_rows: list[int]) -> None:
        backend = StreamedExperts(
            self.bridge, self.config, BF16, CUDA, max_rows=max(all_rows), max_slots=16, max_rank=LORA_RANK
        )  # fmt: skip
        for layer in range(self.layers):
            backend.add_source(layer, random_store(layer, self.config))
        automatic = backend.measure()
        self.say("prefill", "measured", threshold=automatic, copy_ms=backend.measured["streamed_s"] * 1e3)
        for rows in all_rows:
            step = Step(self.config, self.layers, rows)
            found = {}
            for name, limit in (("cpu", NEVER), ("streamed", 1), ("automatic", automatic)):
                backend.threshold = limit
                run = functools.partial(step.run, backend, step.tasks(backend))
                found[name] = median_ms(backend, rows, run, 3, eager=True, warm_up=1) / self.layers
            self.say(
                "prefill", f"{rows} rows", cpu_ms=found["cpu"], streamed_ms=found["streamed"],
                automatic_ms=found["automatic"], over_best=found["automatic"] / min(found["cpu"], found["streamed"]),
                tok_s=rows / (found["automatic"] * 48) * 1e3,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=["handshake", "decode", "gpu", "hybrid", "prefill"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--quantise", choices=("int8", "int4"), help="the CPU's experts")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.25, 0.5, 1.0], help="of the experts, hybrid")
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the routing's weights, hybrid")
    parser.add_argument("--prefill-rows", type=int, nargs="+", default=[512, 2048, 8192, 32768])
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    torch.set_num_threads(4)
    bench = Bench(args.layers, args.repeats, args.quantise)
    print(bench.machine, flush=True)
    for section in args.sections:
        if section == "handshake":
            bench.handshake()
        elif section == "decode":
            bench.decode(args.rows)
        elif section == "gpu":
            bench.gpu([*args.rows, 512, 4096])
        elif section == "hybrid":
            bench.hybrid(args.shares, [1, 32], args.zipf)
        elif section == "prefill":
            bench.prefill(args.prefill_rows)
        else:
            parser.error(f"section {section}: handshake, decode, gpu, hybrid or prefill")
        if args.out:
            record.write(args.out, {"machine": bench.machine} | bench.results)


if __name__ == "__main__":
    main()
