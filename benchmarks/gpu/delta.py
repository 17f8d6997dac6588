"""A model with gated delta nets on one GPU, experts on the CPU: Qwen3.5-35B-A3B's shape with random weights.

    python -m benchmarks.gpu.delta [--layers 8] [--rows 1 8 32] [--prompts 2048 8192] [--experts native]
                                   [--tiny] [--out FILE.json]

The engine that `ktserve serve` builds, in bfloat16. Of each row count and prompt:

ms, tok/s   a decode step as CUDA graph, one step ahead as the engine runs it; a prompt alone, in the engine's chunks
gpu         the same with the experts left out: what the GPU needs
delta       of that, the delta nets of all layers, as a graph of them alone
GB/s        states that these read and write, over that time; `peak`: its share of the GPU's data sheet, `copy`: of what
            a copy reaches here. One row's states may stay in the GPU's cache from one replay to the next
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.gpu.decode import AHEAD, Bench
from benchmarks.gpu.hbm import copied_bytes_per_s, sheet_bytes_per_s, timed
from benchmarks.gpu.served import Served
from benchmarks.models.configs import QWEN3_5_35B_A3B
from benchmarks.models.folder import write_folder
from benchmarks.settings import served_config
from engine.attention.base import BLOCK_SIZE, BatchLayout
from engine.attention.delta import DeltaBackend, DeltaInputs
from engine.model.delta import DeltaNetAttention
from engine.steps.runner import ModelRunner
from scheduler.plan import NO_STATE, RowState, StepPlan, StepRow
from scheduler.request import Request, SamplingParams
from testing.harness import model_runner

TINY = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "vocab_size": 512,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "max_position_embeddings": 1024,
}  # fmt: skip
CONTEXT = 512
SECONDS = 1.5  # of each measurement, about
REPLAYS = 20


class DeltaBench(Bench):
    """Decode rows go on from a state each."""

    def plan(self, rows: int, number: int, adapters: int) -> StepPlan:
        plan = super().plan(rows, number, adapters)
        states = [StepRow(r.request, r.start, 1, 0, True, (), RowState(i, i)) for i, r in enumerate(plan.rows)]
        return StepPlan(plan.step, states, plan.block_tables)


def load(args: argparse.Namespace, folder: Path) -> tuple[DeltaBench, list[str], int]:
    """The bench, what the engine says of itself, and the longest chunk of a prompt."""
    rows = max(args.rows)
    positions = max(rows * (CONTEXT + AHEAD + BLOCK_SIZE), max(args.prompts) + BLOCK_SIZE)
    flags = ["--pack-cache", "off", "--max-num-seqs", str(rows), "--kv-cache-tokens", str(positions)]
    flags += ["--expert-backend", args.experts, "--max-model-len", str(max(*args.prompts, 2 * CONTEXT))]
    if args.tiny:
        flags += ["--device", "cpu", "--cpu-threads", "1", "--rules", "reference"]
    else:
        flags += ["--device", "cuda"]
    changes = {**QWEN3_5_35B_A3B, **(TINY if args.tiny else {}), "num_hidden_layers": args.layers}
    core = (served := Served(served_config(write_folder(folder, changes), flags))).core
    runner = model_runner(core)
    if args.tiny and runner.padded is None:
        runner.padded = runner.pad_decode(rows, 0, core.scheduler.config.num_blocks)
        runner.padded.takes = lambda plan: False  # type: ignore[method-assign]  # padding rows have no states there
    blocks, config = core.scheduler.config.num_blocks, runner.model.config
    bench = DeltaBench(config, runner, blocks, rows, 0, CONTEXT, 0.0 if args.tiny else SECONDS)
    return bench, served.lines, core.scheduler.config.max_num_batched_tokens


def prompt_s(runner: ModelRunner, tokens: int, most: int, seed: int) -> float:
    """A prompt alone, in chunks of at most `most` tokens, until its first token is there."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, runner.model.config.vocab_size, (tokens,), generator=g).tolist()
    request = Request("prompt", ids, SamplingParams(temperature=0.0))
    table = array("i", range(-(-tokens // BLOCK_SIZE)))
    began = time.perf_counter()
    for at in range(0, tokens, most):
        count = min(most, tokens - at)
        state = RowState(0, 0 if at else NO_STATE)
        row = StepRow(request, at, count, 0, at + count == tokens, (), state)
        step = runner.launch_forward(StepPlan(0, [row], [table]))
        runner.launch_sample(step)
        runner.tokens(step)
    return time.perf_counter() - began


def delta_s(runner: ModelRunner, batch: BatchLayout) -> float:
    """All delta nets of the model over such a batch, seconds: a graph of nothing else, or on a CPU the calls."""
    attentions = [a for layer in runner.model.layers if isinstance(a := layer.attention, DeltaNetAttention)]
    device, dtype, spec = runner.device, runner.model.dtype, runner.model.config.delta_nets[0]
    tokens = batch.num_tokens
    wide = [spec.channels + spec.value_width] if spec.fused else [spec.channels, spec.value_width]
    gates = [2 * spec.value_heads] if spec.fused_gates else [spec.value_heads] * 2
    given = DeltaInputs(
        [torch.randn(tokens, n, device=device).to(dtype) for n in wide],
        [torch.randn(tokens, n, device=device) for n in gates],
    )

    def run() -> None:
        for attention in attentions:
            attention.backend.mix(attention.layer, given, attention.vectors)

    with runner.computing():
        for backend in {id(a.backend): a.backend for a in attentions}.values():
            backend.plan(batch)
        run()
        if device.type == "cpu":
            return timed(run, device, 1)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device), capture_error_mode="thread_local"):
            run()
        return timed(graph.replay, device, REPLAYS)


def batch_of(rows: int, tokens: int, device: torch.device, padded: bool) -> BatchLayout:
    """Of states in slots 0 and on."""
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    starts = list(range(0, rows * tokens + 1, tokens))
    return BatchLayout(starts, [tokens] * rows, [], nothing, nothing, padded, [RowState(i, i) for i in range(rows)])


def measure(bench: DeltaBench, args: argparse.Namespace, most: int) -> dict[str, Any]:
    runner, spec = bench.runner, bench.config.delta_nets[0]
    device, captures = runner.device, runner.device.type == "cuda"
    nets = sum(isinstance(layer.attention, DeltaNetAttention) for layer in runner.model.layers)
    copy, peak, decode, prompts = copied_bytes_per_s(device), sheet_bytes_per_s(device), [], []
    for rows in args.rows:
        bench.runner.padded = bench.served
        step_s = bench.step_s(rows)
        gpu_s = None
        if captures:
            with bench.without_experts():
                bench.padded(rows, capture=True)
                gpu_s = bench.step_s(rows, share=1 / 3)
        took = delta_s(runner, batch_of(rows, 1, device, captures))
        moved = 2 * rows * nets * spec.cache.state_bytes
        decode.append({
            "rows": rows, "ms": step_s * 1e3, "tok_s": rows / step_s, "gpu_ms": gpu_s and gpu_s * 1e3,
            "delta_ms": took * 1e3, "gb_s": moved / took / 1e9, "peak": peak and moved / took / peak,
            "copy": moved / took / copy,
        })  # fmt: skip
        print(line(decode[-1]), flush=True)
    bench.runner.padded = bench.served
    for tokens in args.prompts:
        times = [prompt_s(runner, tokens, most, seed) for seed in range(1 if args.tiny else 4)]
        with bench.without_experts():
            alone = [prompt_s(runner, tokens, most, seed) for seed in range(1 if args.tiny else 3)]
        step_s = statistics.median(times[1:] or times)
        took = delta_s(runner, batch_of(1, tokens, device, padded=False))
        prompts.append({
            "tokens": tokens, "ms": step_s * 1e3, "tok_s": tokens / step_s, "gpu_ms": min(alone) * 1e3,
            "delta_ms": took * 1e3,
        })  # fmt: skip
        print(line(prompts[-1]), flush=True)
    return {"decode": decode, "prompts": prompts, "copy_gb_s": copy / 1e9, "hbm_gb_s": peak and peak / 1e9}


def line(found: dict[str, Any]) -> str:
    return "  ".join(f"{key} {value:.4g}" for key, value in found.items() if value is not None)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the random model; it is written if it is not there")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--experts", default="native", choices=("native", "gpu"))
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU: shows that it works")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.tiny:
        args.rows, args.prompts, args.layers, args.experts = [1, 2], [70, 130], 4, "reference"
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ktserve-bench-") as temporary:
        bench, lines, most = load(args, args.model or Path(temporary) / "model")
    print(
        *lines, f"{args.layers} layers written and loaded in {time.perf_counter() - began:.0f} s", sep="\n", flush=True
    )
    backends = [b for b in bench.runner.model.attention_backends if isinstance(b, DeltaBackend)]
    found = measure(bench, args, most)
    about = {"layers": args.layers, "experts": args.experts, "delta": [type(b).__name__ for b in backends]}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    if args.out:
        record.write(args.out, {"about": {"gpu": gpu, "torch": torch.__version__, **about, "lines": lines}, **found})


if __name__ == "__main__":
    main()
