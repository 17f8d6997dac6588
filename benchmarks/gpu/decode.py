"""Decode on one GPU with the experts on the CPU, at Qwen3-30B-A3B's shape with random weights.

    python -m benchmarks.gpu.decode [--layers 48] [--rows 1 8 32 64 128] [--experts native|kt|gpu|hybrid]
                                    [--gpu-experts 64] [--quantise int8] [--adapters 16] [--peer OTHER.json]
                                    [--dry] [--out FILE.json]

The steps (launch, sample, read, one step ahead) of the engine that `ktserve serve` builds, over sequences of --context
positions; other tokens in every step. Of each row count:

ms, tok/s   a step as CUDA graph; `plain`: the same launches one by one
gpu         a step whose experts are left out: what the GPU needs
glue        (a step of which no row counts) - gpu, per layer: the handshake alone
GB/s        bytes of the distinct experts over (ms - gpu); `peak`: its share of the read bandwidth measured here
over        (ms - gpu) / (bytes / read bandwidth); where a GPU holds experts too, neither is about the CPU alone

With --adapters the rows are shared out over so many adapters of rank 16 on attention and experts, beside base only.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import platform
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.gpu.served import Served
from benchmarks.models.folder import write_folder
from benchmarks.models.random import DRY, LORA_RANK, expert_bytes, random_lora, random_values
from benchmarks.settings import served_config
from engine.architectures.config import ModelConfig
from engine.attention.base import BLOCK_SIZE
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.reference import ReferenceAttention
from engine.experts.base import ExpertBackend, ExpertTask
from engine.lora.adapter import AdapterWeights, LoraPair
from engine.model.mlp import SparseMlp
from engine.steps.graphs.padded import PaddedDecode
from engine.steps.runner import InFlight, ModelRunner
from engine.weights.layout import tensors
from native.topology import make_pool
from scheduler.plan import StepPlan, StepRow
from scheduler.request import Request, SamplingParams
from testing.harness import model_runner

SECONDS = 3.0  # of each measurement, about
LEAST = 8  # steps of each
AHEAD = 512  # steps that a sequence may grow by


class NoExperts:
    """Stands in for a backend whose work is left out."""

    follows_stream = True
    buffers_on = "cuda"

    def post(self, task: ExpertTask, stream: Any = None) -> None: ...

    def wait(self, task: ExpertTask, stream: Any = None) -> None: ...


@dataclass
class Bench:
    config: ModelConfig
    runner: ModelRunner
    scratch: int
    max_rows: int
    slots: int
    context: int
    seconds: float

    def __post_init__(self) -> None:
        if self.runner.padded is None:
            raise SystemExit(f"no CUDA graphs were captured: {'; '.join(self.runner.notes)}")
        self.served = self.runner.padded

    @classmethod
    def load(cls, args: argparse.Namespace) -> Bench:
        """The engine that `ktserve serve` builds, over a cache of random keys and values."""
        rows = max(args.rows)
        changes = {"num_hidden_layers": args.layers, **(DRY if args.dry else {})}
        flags = ["--device", "cuda", "--pack-cache", "off", "--max-num-seqs", str(rows)]
        positions = rows * (args.context + AHEAD + BLOCK_SIZE)
        flags += ["--expert-backend", args.experts, "--kv-cache-tokens", str(positions)]
        if args.adapters:
            flags += ["--max-adapter-slots", str(args.adapters), "--max-adapter-rank", str(LORA_RANK)]
        if args.experts == "hybrid":
            flags += ["--gpu-experts", args.gpu_experts]
        if args.experts == "kt":
            flags += ["--kt-method", {"int8": "AMXInt8", "int4": "AMXInt4"}.get(args.quantise or "", "AMXBF16")]
        elif args.quantise:
            flags += ["--quantise", args.quantise]
        if args.dry:
            flags += ["--device", "cpu", "--cpu-threads", "1", "--rules", "reference", "--cuda-graphs", "padded"]
        with tempfile.TemporaryDirectory(prefix="ktserve-bench-") as temporary:
            model = write_folder(args.model or Path(temporary) / "model", changes)
            core = Served(served_config(model, flags)).core
        runner = model_runner(core)
        for attention in runner.model.attention_backends:
            if not isinstance(attention, FlashInferAttention | ReferenceAttention):
                raise SystemExit(f"{type(attention).__name__} has no cache that could be filled: --device cuda")
            for part in (t for pair in attention.cache.values() for t in pair):
                part.normal_()
        blocks = core.scheduler.config.num_blocks
        seconds = 0.0 if args.dry else SECONDS
        return cls(runner.model.config, runner, blocks, rows, args.adapters, args.context, seconds)

    def plan(self, rows: int, number: int, adapters: int) -> StepPlan:
        """Step `number` of `rows` sequences; their tokens are known, random and different from step to step."""
        each = -(-(self.context + AHEAD) // BLOCK_SIZE)
        start = self.context + number % AHEAD
        made, tables = [], []
        for row in range(rows):
            token = (7919 * (number * rows + row) + 13) % self.config.vocab_size
            request = _Known(f"r{row}", token)
            made.append(StepRow(request, start, 1, row % adapters + 1 if adapters else 0, True))
            tables.append(array("i", range(row * each, row * each + start // BLOCK_SIZE + 1)))
        return StepPlan(number, made, tables)

    def padded(self, rows: int, capture: bool, tracing: bool = False) -> PaddedDecode:
        self.runner.tracing = tracing
        made = self.runner.pad_decode(self.max_rows, self.slots, self.scratch)
        if capture and self.runner.device.type == "cuda":
            with self.runner.computing():
                made.capture(lambda *_: None, [next(size for size in made.buckets if size >= rows)])
        return made

    def step_s(self, rows: int, adapters: int = 0, share: float = 1.0) -> float:
        """The median step, in seconds. `share` of a measurement's time is taken."""
        return statistics.median(self.step_times(rows, adapters, most_s=share * self.seconds)[3:])

    def step_times(
        self, rows: int, adapters: int = 0, *, first: int = 0, count: int = AHEAD - 1, most_s: float = math.inf
    ) -> list[float]:
        """Seconds from token to token of steps `first` and on, one step ahead as the engine runs."""
        times: list[float] = []
        before: InFlight | None = None
        begun = last = time.perf_counter()
        for number in range(first, first + count):
            step = self.runner.launch_forward(self.plan(rows, number, adapters))
            self.runner.launch_sample(step)
            if before is not None:
                self.runner.tokens(before)
                now = time.perf_counter()
                times.append(now - last)
                last = now
            before = step
            if len(times) >= LEAST and last - begun > most_s:
                break
        if before is not None:
            self.runner.tokens(before)
        return times

    def distinct(self, rows: int) -> float:
        """Distinct experts of a layer."""
        self.padded(rows, capture=False, tracing=True)
        step = self.runner.launch_forward(self.plan(rows, 3, 0))
        self.runner.launch_sample(step)
        self.runner.tokens(step)
        self.runner.tracing = False
        return statistics.mean(step.trace.experts_touched) if step.trace else 0.0

    @contextmanager
    def without_experts(self) -> Iterator[None]:
        model = self.runner.model
        mlps = [layer.mlp for layer in model.layers if isinstance(layer.mlp, SparseMlp)]
        held, backends = [mlp.backend for mlp in mlps], model.expert_backends
        nothing: Any = NoExperts()
        model.expert_backends = []
        for mlp in mlps:
            mlp.backend = nothing
        yield
        model.expert_backends = backends
        for mlp, backend in zip(mlps, held, strict=True):
            mlp.backend = backend


class _Known(Request):
    """A request whose next token is known, whatever its position."""

    def __init__(self, name: str, token: int) -> None:
        super().__init__(name, [token], SamplingParams(temperature=0.0))
        self._token = token

    def tokens(self, start: int, end: int) -> list[int]:
        return [self._token] * (end - start)

    def token(self, position: int) -> int:
        return self._token


@contextmanager
def no_rows(padded: PaddedDecode) -> Iterator[None]:
    """No row of a step counts."""
    fill: Callable[..., None] = padded.inputs.fill
    padded.inputs.fill = lambda step, valid_rows: fill(step, 0)  # type: ignore[method-assign]
    yield
    padded.inputs.fill = fill  # type: ignore[method-assign]


def measure(bench: Bench, rows: int, bytes_per_s: float, each: int, adapters: int) -> dict[str, Any]:
    layers = len(bench.config.sparse_layers)
    num_bytes = bench.distinct(rows) * layers * each
    bench.runner.padded = captured = bench.served
    step_s = bench.step_s(rows)
    found: dict[str, Any] = {"rows": rows, "ms": step_s * 1e3, "tok_s": rows / step_s, "gbytes": num_bytes / 1e9}
    if adapters:
        mixed_s = bench.step_s(rows, adapters)
        found |= {"adapters": adapters, "adapters_ms": mixed_s * 1e3, "adapters_share": step_s / mixed_s}
    with no_rows(captured):
        idle_s = bench.step_s(rows, share=1 / 6)
    with bench.without_experts():
        bench.padded(rows, capture=True)
        gpu_s = bench.step_s(rows, share=1 / 6)
    bench.padded(rows, capture=False)
    plain_s = bench.step_s(rows)
    expert_s = max(step_s - gpu_s, 1e-9)
    return found | {
        "plain_ms": plain_s * 1e3,
        "gpu_ms": gpu_s * 1e3,
        "glue_us": (idle_s - gpu_s) / layers * 1e6,
        "gb_s": num_bytes / expert_s / 1e9,
        "peak": num_bytes / expert_s / bytes_per_s,
        "over": expert_s / (num_bytes / bytes_per_s),
    }


def add_adapters(bench: Bench, count: int) -> None:
    """`count` adapters of rank 16 on attention and all experts; they share their values, not their memory."""
    pairs: dict[str, LoraPair] = {}
    held = tensors(bench.config)
    for name in bench.runner.model.linears:
        if name.endswith("_proj"):
            out, inner = held[f"{name}.weight"].shape
            pairs[name] = LoraPair(random_values(LORA_RANK, inner), random_values(out, LORA_RANK), 1.0)
    lora = random_lora(bench.config)
    adapter = AdapterWeights("random", "random", pairs, dict.fromkeys(bench.config.sparse_layers, lora))
    for slot in range(1, count + 1):
        bench.runner.model.set_adapter(slot, adapter)


def read_bandwidth(backend: ExpertBackend, num_bytes: int) -> float:
    """Bytes per second, by the backend's own pool where it has one of ours."""
    native: Any = importlib.import_module("native._native")
    pool = getattr(getattr(backend, "inner", backend), "pool", None) or make_pool()
    return float(native.read_bandwidth(pool, num_bytes, repeats=5))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the random model; it is written if it is not there")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--experts", default="native", choices=("native", "kt", "gpu", "hybrid"))
    parser.add_argument("--gpu-experts", default="64", help="of hybrid: how many of a layer's experts, or a size")
    parser.add_argument("--quantise", choices=("int8", "int4"))
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--peer", type=Path, help="results of another run, to compare with")
    parser.add_argument("--dry", action="store_true", help="a small model on the CPU: shows that it works")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    began = time.perf_counter()
    bench = Bench.load(args)
    loaded_s = time.perf_counter() - began
    num_bytes = expert_bytes(bench.config, args.quantise)
    bytes_per_s = read_bandwidth(bench.runner.model.expert_backends[0], 1 << 24 if args.dry else 4 << 30)
    if args.adapters:
        add_adapters(bench, args.adapters)
    print(f"{args.layers} layers loaded in {loaded_s:.0f} s; read {bytes_per_s / 1e9:.0f} GB/s", flush=True)
    peers = {r["rows"]: r for r in json.loads(args.peer.read_text())["results"]} if args.peer else {}
    results = []
    print(" rows       ms   tok/s    plain     gpu  glue us   GB/s  peak  over   peer")
    for rows in args.rows:
        r = measure(bench, rows, bytes_per_s, num_bytes, args.adapters)
        if rows in peers:
            r["peer"] = peers[rows]["ms"] / r["ms"]
        results.append(r)
        print(
            f"{rows:5}{r['ms']:9.2f}{r['tok_s']:8.1f}{r['plain_ms']:9.2f}{r['gpu_ms']:8.2f}{r['glue_us']:9.1f}"
            f"{r['gb_s']:7.1f}{r['peak']:6.2f}{r['over']:6.2f}{r.get('peer', float('nan')):7.2f}"
            + (f"  {args.adapters} adapters {r['adapters_share']:.2f}" if args.adapters else ""),
            flush=True,
        )
    if args.out:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        about = {
            "gpu": gpu, "cpu": platform.processor(), "torch": torch.__version__,
            "layers": args.layers, "experts": args.experts, "quantise": args.quantise, "context": args.context,
            "read_gb_s": bytes_per_s / 1e9, "loaded_s": loaded_s,
        }  # fmt: skip
        record.write(args.out, {"about": about, "results": results})


if __name__ == "__main__":
    main()
