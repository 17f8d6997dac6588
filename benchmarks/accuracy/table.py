"""Errors of every backend, format and batch mix against float32 transformers, as a table.

    python -m benchmarks.accuracy.table [--write docs/accuracy.md]

Of each position whose routers have no near-tie: mean|d| / mean|ref| of its logits; shown is the median over positions
(a flipped expert elsewhere in the sequence moves all that follows, in any implementation), averaged over three random
models. `transformers` is the same for transformers itself in bf16; the bound for bf16 weights is 1.25 times that.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.grammar.masks import NO_MASKS, Masks
from engine.steps.runner import InFlight
from scheduler.plan import StepPlan
from testing.harness import Harness
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import tiny_model

MIXES = ("prefill", "chunked prefill", "decode", "prefix hit", "preempted")
TIE = 0.2  # gap of router logits (of standard deviation 9) under which bf16 may choose other experts
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "head_dim": 64,
    "num_hidden_layers": 3,
}


@dataclass(frozen=True)
class Measured:
    error: float
    transformers: float
    positions: int

    @property
    def ratio(self) -> float:
        return self.error / self.transformers


class Files:
    """One model in one GGUF format, with what transformers makes of it in float32 and bf16."""

    def __init__(self, folder: Path, weights: str, seed: int = 0, **shape: Any) -> None:
        self.path = folder / f"{weights}-{seed}.gguf"
        model = tiny_model(seed, **(SHAPE | shape))
        with torch.no_grad():  # a trained router is sure of itself; a random one would flip at every other token
            for layer in model.model.layers:
                for name in {"gate", "router"} & {name for name, _ in layer.mlp.named_children()}:
                    getattr(layer.mlp, name).weight *= 6
        self.float32 = save_gguf(model, self.path, expert_type=weights, dense_type=weights)
        self.bfloat16 = copy.deepcopy(self.float32).bfloat16()


def measure_apart(weights: str, mix: str, seed: int, config: dict[str, Any]) -> Measured:
    """`measure` in a process of its own: kt_kernel allows one backend in each. They are forks of one that has imported
    this module and computed nothing."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["benchmarks.accuracy.table"])
    with ProcessPoolExecutor(1, mp_context=forks) as pool:
        return pool.submit(_measure_one, weights, mix, seed, config).result()


def _measure_one(weights: str, mix: str, seed: int, config: dict[str, Any]) -> Measured:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return measure(Files(Path(folder), weights, seed), mix, seed, **config)


def measure(files: Files, mix: str, seed: int = 0, **config: Any) -> Measured:
    """Run one batch mix on the engine and compare every position's logits."""
    g = torch.Generator().manual_seed(seed)

    def prompt(n: int) -> list[int]:
        return torch.randint(2, 128, (n,), generator=g).tolist()

    settings: dict[str, Any] = {"dtype": "bfloat16", "max_num_batched_tokens": 128, "max_num_seqs": 8}
    settings |= {
        "chunked prefill": {"max_num_batched_tokens": 16},
        "preempted": {"kv_cache_tokens": 128, "max_model_len": 112},
    }.get(mix, {})
    settings["prompt_lane"] = "off"  # `recording` sees the steps of one runner
    engine = Harness(files.path, **(settings | config))
    with recording(engine) as logits:
        if mix == "prefix hit":
            start = prompt(64)
            engine.generate([start], max_tokens=1)
            logits.clear()
            asked = [start + prompt(n) for n in (5, 20, 40)]
            engine.generate(asked, max_tokens=4)
        elif mix in ("prefill", "chunked prefill"):
            engine.generate([prompt(n) for n in (40, 60, 25)], max_tokens=1)
        elif mix == "decode":
            engine.generate([prompt(n) for n in (2, 5, 9, 3, 2, 7)], max_tokens=40)
        else:
            engine.generate([prompt(n) for n in (40, 30, 35)], max_tokens=50)
            if not engine.core.scheduler.stats()["preemptions"]:
                raise RuntimeError("nothing was preempted: the mix does not measure what it says")
    full = {rid: engine.prompts[rid] + result.tokens for rid, result in engine.results.items()}
    engine.close()
    return _compare(files, full, logits)


@contextmanager
def recording(engine: Harness) -> Iterator[dict[tuple[str, int], torch.Tensor]]:
    """Logits of every position that a step computes, by (request id, position); the last computation counts."""
    runner = engine.runner
    original, logits = runner.launch_forward, {}

    def computed(step: InFlight) -> torch.Tensor:
        if step.hidden is not None:
            return runner.model.logits(step.hidden)
        if step.logits is not None:
            return step.logits
        assert runner.padded is not None, "a greedy step of graphs, which leaves its logits in their buffer"
        return runner.model.head.whole(runner.padded.logits[: len(step.arrays.kept)])

    def launch(plan: StepPlan, masks: Masks = NO_MASKS) -> InFlight:
        step = original(plan, masks)
        with runner.computing():
            rows = computed(step).float().cpu().clone()
        for row, first in zip(plan.rows, step.arrays.row_starts.tolist(), strict=False):
            for i in range(row.num_tokens):
                logits[row.request.request_id, row.start + i] = rows[first + i]
        return step

    runner.launch_forward = launch  # type: ignore[method-assign]
    runner.keep_all = True
    yield logits
    runner.launch_forward = original  # type: ignore[method-assign]


@torch.inference_mode()
def _compare(files: Files, full: dict[str, list[int]], logits: dict[tuple[str, int], torch.Tensor]) -> Measured:
    ours: list[float] = []
    theirs: list[float] = []
    for rid, tokens in full.items():
        ids = torch.tensor([tokens])
        with _router_logits(files.float32) as routed:
            ref = files.float32(ids)
        clear = _clear(routed, files.float32.config.num_experts_per_tok)
        bf16 = files.bfloat16(ids).logits[0].float()
        for position in range(len(tokens)):
            if (rid, position) in logits and bool(clear[position]):
                want = ref.logits[0, position].float()
                ours.append(float((logits[rid, position] - want).abs().mean() / want.abs().mean()))
                theirs.append(float((bf16[position] - want).abs().mean() / want.abs().mean()))
    return Measured(statistics.median(ours), statistics.median(theirs), len(ours))


@contextmanager
def _router_logits(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Of the calls inside, [tokens, experts] by layer, which not every release returns for every family."""
    found: list[torch.Tensor] = []

    def keep(router: torch.nn.Module, given: object, out: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        found.append(out[0] if isinstance(out, tuple) else out)

    routers = [module for name, module in model.named_modules() if name.rpartition(".")[2] in ("gate", "router")]
    hooks = [router.register_forward_hook(keep) for router in routers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _clear(router_logits: list[torch.Tensor], top_k: int) -> torch.Tensor:
    """Positions at which every layer's choice of experts has a margin."""
    clear = torch.ones(router_logits[0].shape[0], dtype=torch.bool)
    for layer in router_logits:
        best = layer.float().topk(min(top_k + 1, layer.shape[-1]), -1).values
        if best.shape[-1] > top_k:
            clear &= best[:, top_k - 1] - best[:, top_k] > TIE
    return clear


KT_FORMATS = ("BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")  # the others it would read as bf16, or not at all
RULES = {"reference": "reference", "kt": "cpu-kt", "native": "cpu"}
SEEDS = range(3)


def table(backends: list[str], formats: list[str]) -> Iterator[str]:
    yield "| backend | weights | " + " | ".join(MIXES) + " | transformers bf16 |"
    yield "|---" * (len(MIXES) + 3) + "|"
    with tempfile.TemporaryDirectory() as folder:
        for weights in formats:
            files = [Files(Path(folder), weights, seed) for seed in SEEDS]
            for backend in backends:
                if backend == "kt" and weights not in KT_FORMATS:
                    continue
                config = {"rules": RULES[backend], "dtype": "auto"}
                if backend == "kt":
                    runs = [[measure_apart(weights, mix, seed, config) for seed in SEEDS] for mix in MIXES]
                else:
                    runs = [[measure(f, mix, seed, **config) for seed, f in enumerate(files)] for mix in MIXES]
                theirs = statistics.mean(m.transformers for cell in runs for m in cell)
                row = " | ".join(f"{statistics.mean(m.error for m in cell):.4f}" for cell in runs)
                yield f"| {backend} | {weights} | {row} | {theirs:.4f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--backends", default=",".join(RULES))
    parser.add_argument("--formats", default="BF16,Q8_0,Q4_0,Q4_1,Q5_0,Q5_1,Q4_K,Q5_K,Q6_K")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for line in table(args.backends.split(","), args.formats.split(",")):
        print(line, flush=True)
        lines.append(line)
    if args.write:
        args.write.write_text(f"# Accuracy\n\n{__doc__}\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
