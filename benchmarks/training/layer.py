"""One layer of Qwen3-30B-A3B's experts, forward and backward with LoRA, per packed format and number of rows.

python -m benchmarks.training.layer [--threads N] [--isa avx2] [--types BF16 Q8_0] [--rows 128 512] [--peers kt torch]
                                  [--variants none eight again] [--phases] [--seconds S] [--json FILE]

Variants run turn by turn and the fastest of `--repeats` counts: one adapter on all rows, none, eight adapters in turn
over the rows, and one with gate and up computed again instead of kept; `--variants` chooses among the last three. The
share of the peak counts the operations of the base weights and of LoRA, forward and backward. --peers kt: kt_kernel's
training class on bf16 weights in the same turns, with a transposed copy of the weights of its own and with a shared
one, of which the faster counts; it needs AVX-512 with BF16, and what is missing is said. --peers torch: autograd over
bf16 and over float32 weights. --phases: where the time of one adapter's step goes, in ms, with the share of it that the
workers were busy.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.kernels.experts import HIDDEN, INTERMEDIATE, TOP_K, choices, make_layer
from benchmarks.kernels.probe import Peaks, arguments, make_pool, measure_peaks
from benchmarks.peers.kt import KtError
from benchmarks.training.kt import KtShape, KtTrainer
from benchmarks.training.peers import TorchExperts
from training.experts.base import ExpertLora
from training.experts.native import kept_shape, train_batch, train_loras

_native: Any = importlib.import_module("native._native")

ADAPTERS = 8
Seconds = tuple[float, float]  # of forward, of backward


class Step:
    """Buffers of a step of `rows` rows over `layer`."""

    def __init__(self, trainer: Any, layer: Any, ids: torch.Tensor, loras: list[ExpertLora], keep: bool) -> None:
        rows = len(ids)
        self.trainer, self.layer = trainer, layer
        hidden, grad_out = (torch.randn(rows, HIDDEN).bfloat16() for _ in range(2))
        weights = torch.full((rows, TOP_K), 1 / TOP_K)
        slots = (torch.arange(rows) % len(loras) + 1 if loras else torch.zeros(rows)).to(torch.int32)
        adapters = [(i + 1, lora.rank, 2.0) for i, lora in enumerate(loras)]
        kept = torch.empty(kept_shape(rows * TOP_K, INTERMEDIATE, adapters), dtype=torch.bfloat16) if keep else None
        matrices = [matrix.data for lora in loras for matrix in lora.matrices()]
        grads: list[torch.Tensor | None] = [torch.zeros_like(matrix) for matrix in matrices]
        self.out, self.grad_hidden, self.grad_weights = hidden.clone(), hidden.clone(), weights.clone()
        self.held = (hidden, grad_out, weights, slots, ids, kept, matrices, grads)
        self.batch = train_batch(hidden, weights, ids, slots)
        self.loras = train_loras(adapters, matrices, grads)
        self.kept, self.grad_out = 0 if kept is None else kept.data_ptr(), grad_out.data_ptr()
        self.saved_bytes = (hidden.nbytes + (0 if kept is None else kept.nbytes)) / rows

    def seconds(self) -> Seconds:
        began = time.perf_counter()
        self.trainer.forward(self.layer, self.loras, self.batch, out=self.out.data_ptr(), kept=self.kept)
        middle = time.perf_counter()
        self.trainer.backward(
            self.layer,
            self.loras,
            self.batch,
            kept=self.kept,
            grad_out=self.grad_out,
            grad_hidden=self.grad_hidden.data_ptr(),
            grad_weights=self.grad_weights.data_ptr(),
        )
        return middle - began, time.perf_counter() - middle


def turn_by_turn(variants: dict[str, Callable[[], Seconds]], repeats: int) -> dict[str, Seconds]:
    """The fastest forward and the fastest backward of each, after a round to warm up."""
    best: dict[str, Seconds] = {}
    for i in range(repeats + 1):
        for name, run in variants.items():
            forward, backward = run()
            if i == 1:
                best[name] = (forward, backward)
            elif i > 1:
                best[name] = (min(best[name][0], forward), min(best[name][1], backward))
    return best


# The jobs of a step with LoRA in their order; those of a slice of columns come once for each slice.
FORWARD, OF_SLICE = ["gather, A x", "gate, up", "A h"], ["down", "combine"]
BACKWARD, BACK_OF_SLICE = (
    ["gather, B'd", "W'd, dh", "dw", "A h, B'dgate, B'dup", "zeros"],
    ["W'd, dx, dA, dB", "sum dx"],
)


def phases(pool: Any, step: Step, repeats: int) -> str:
    """The least seconds of each phase of `repeats` steps."""
    best: dict[str, tuple[float, float]] = {}
    rest = float("inf")
    for _ in range(repeats):
        pool.record(True)
        total = sum(step.seconds())
        pool.record(False)
        calls = pool.take_recorded()
        slices = (len(calls) - len(FORWARD) - len(BACKWARD)) // (len(OF_SLICE) + len(BACK_OF_SLICE))
        names = FORWARD + slices * OF_SLICE + BACKWARD + slices * BACK_OF_SLICE
        found: dict[str, tuple[float, float]] = {}
        for name, (_, seconds, busy) in zip(names, calls, strict=True):
            before = found.get(name, (0.0, 0.0))
            found[name] = (before[0] + seconds, before[1] + busy)
        best = {name: min(found[name], best.get(name, found[name])) for name in found}
        rest = min(rest, total - sum(seconds for seconds, _ in found.values()))
    shares = (f"{name} {s * 1e3:.2f} ({busy / s / pool.threads:.0%})" for name, (s, busy) in best.items())
    return f"{'; '.join(shares)}; between them {rest * 1e3:.2f}"


def operations(rows: int, rank: int) -> tuple[float, float]:
    """Of forward, of backward: two per multiply-add. LoRA's backward multiplies each matrix twice, the base's once."""
    base = 2.0 * rows * TOP_K * 3 * HIDDEN * INTERMEDIATE
    lora = 2.0 * rows * TOP_K * 3 * rank * (HIDDEN + INTERMEDIATE)
    return base + lora, base + 2 * lora


class Bench:
    def __init__(self, args: Any) -> None:
        self.args, self.pool = args, make_pool(args.threads)
        self.until = time.monotonic() + args.seconds
        self.trainer = _native.ExpertTrainer(self.pool, args.isa)
        shape = (args.experts, args.rank, HIDDEN, INTERMEDIATE, 2.0)
        self.loras = [ExpertLora(*shape) for _ in range(ADAPTERS)]
        for lora in self.loras:
            for b in lora.matrices()[3:]:
                torch.nn.init.normal_(b, std=0.02)
        self.results: list[dict[str, Any]] = []
        self.kt = self.start_kt() if "kt" in args.peers else {}

    def start_kt(self) -> dict[str, KtTrainer]:
        """By the names of their variants; those that cannot be, or for which there is no time, are left out."""
        args, began, found = self.args, time.monotonic(), dict[str, KtTrainer]()
        shape = (args.experts, TOP_K, HIDDEN, INTERMEDIATE, args.rank, max(args.rows), args.threads, args.kt_variant)
        for name, shared in (("kt", False), ("kt shared", True)):
            if time.monotonic() - began > args.seconds / 4:
                print(f"no time for {name}", flush=True)
                continue
            try:
                found[name] = KtTrainer(KtShape(*shape, shared=shared))
            except KtError as error:
                print(error, flush=True)
        return found

    def close(self) -> None:
        for trainer in self.kt.values():
            trainer.close()

    def type(self, type: str) -> None:
        layer = make_layer(self.pool, type, self.args.experts, 0)
        peaks = measure_peaks(self.pool, self.args.isa)
        print(f"{type}: {layer.num_bytes / 1e6:.0f} MB on {self.trainer.isa}; {peaks}", flush=True)
        for rows in self.args.rows:
            if time.monotonic() > self.until:
                print(f"no time for {type} x {rows}", flush=True)
                continue
            ids = choices(rows, self.args.experts, 1)[0]
            made = {
                "one": Step(self.trainer, layer, ids, self.loras[:1], True),
                "none": Step(self.trainer, layer, ids, [], True),
                "eight": Step(self.trainer, layer, ids, self.loras, True),
                "again": Step(self.trainer, layer, ids, self.loras[:1], False),
            }
            made = {name: step for name, step in made.items() if name in ("one", *self.args.variants)}
            turns = {name: step.seconds for name, step in made.items()}
            if type == "BF16":
                turns |= {name: partial(trainer.step_s, ids) for name, trainer in self.kt.items()}
            try:
                found = turn_by_turn(turns, self.args.repeats)
            except KtError as error:
                print(f"{error}; it is left out from here on", flush=True)
                self.kt.clear()
                ours = {name: turn for name, turn in turns.items() if name in made}
                found = turn_by_turn(ours, self.args.repeats)
            if self.args.phases:
                print(f"        {phases(self.pool, made['one'], self.args.repeats)}", flush=True)
            self.report(type, rows, found, peaks, {name: step.saved_bytes for name, step in made.items()})

    def report(self, type: str, rows: int, found: dict[str, Seconds], peaks: Peaks, saved: dict[str, float]) -> None:
        forward, backward = found["one"]
        total = {name: sum(seconds) for name, seconds in found.items()}
        of_peak = sum(operations(rows, self.args.rank)) / total["one"] / peaks.of("bf16")
        result: dict[str, Any] = {
            "type": type, "rows": rows, "forward_ms": forward * 1e3, "backward_ms": backward * 1e3,
            "backward_of_forward": backward / forward, "of_peak": of_peak, "saved_bytes": saved["one"],
            "ms": {name: [s * 1e3 for s in seconds] for name, seconds in found.items() if name not in self.kt},
            "peaks": vars(peaks),
        }  # fmt: skip
        parts = [f"{of_peak:.0%} of peak"]
        if "none" in found:
            of_forward, of_step = 1 - found["none"][0] / forward, 1 - total["none"] / total["one"]
            result |= {"lora_of_forward": of_forward, "lora_of_step": of_step}
            parts.append(f"LoRA {of_forward:.0%} of forward, {of_step:.0%} of all")
        if "eight" in found:
            result["one_of_eight"] = total["one"] / total["eight"]
            parts.append(f"8 adapters {result['one_of_eight']:.2f}x")
        if "again" in found:
            result |= {"recomputed_of_kept": total["again"] / total["one"], "saved_bytes_recomputing": saved["again"]}
            parts.append(f"recomputed {result['recomputed_of_kept']:.2f}x the time")
        parts.append(f"{saved['one'] / 1e3:.1f} KB a row kept")
        if theirs := [name for name in self.kt if name in found]:
            best = min(theirs, key=lambda name: total[name])
            result |= {"kt_ms": {name: [s * 1e3 for s in found[name]] for name in theirs}}
            result["kt_ratio"] = total[best] / total["one"]
            text = f"{best} {found[best][0] * 1e3:.1f} + {found[best][1] * 1e3:.1f} ms: {result['kt_ratio']:.2f}x"
            parts.append(text)
        print(
            f"  {rows:>5} rows: {forward * 1e3:7.1f} + {backward * 1e3:7.1f} ms ({backward / forward:.2f}x), "
            f"{'; '.join(parts)}",
            flush=True,
        )
        self.write({k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()})

    def autograd(self) -> None:
        torch.set_num_threads(self.args.threads)
        for dtype in (torch.bfloat16, torch.float32):
            layer = TorchExperts(self.args.experts, HIDDEN, INTERMEDIATE, self.args.rank, dtype)
            for rows in self.args.rows:
                if time.monotonic() > self.until:
                    continue
                ids = choices(rows, self.args.experts, 1)[0]
                step = (torch.randn(rows, HIDDEN), ids, torch.full((rows, TOP_K), 1 / TOP_K))
                best = turn_by_turn({"torch": partial(layer.step_s, *step)}, 1)["torch"]
                name = str(dtype).removeprefix("torch.")
                print(f"  torch {name} {rows:>5} rows: {best[0] * 1e3:7.1f} + {best[1] * 1e3:7.1f} ms", flush=True)
                self.write({"peer": f"torch {name}", "rows": rows, "forward_s": best[0], "backward_s": best[1]})
            del layer
        torch.set_num_threads(1)

    def write(self, result: dict[str, Any]) -> None:
        self.results.append(result)
        if self.args.json:
            record.write(self.args.json, {"isa": self.trainer.isa, "results": self.results})


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.set_defaults(repeats=3)
    parser.add_argument("--types", nargs="+", default=["BF16", "Q8_0", "Q4_K"])
    parser.add_argument("--rows", nargs="+", type=int, default=[128, 512, 2048])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--peers", nargs="*", choices=["kt", "torch"], default=[], help="what is timed as well")
    parser.add_argument(
        "--kt-variant", default="", help="kt_kernel's build, avx512_bf16 for instance; default: its own"
    )
    parser.add_argument("--variants", nargs="*", choices=["none", "eight", "again"], default=["none", "eight", "again"])
    parser.add_argument("--phases", action="store_true", help="also print the time of each phase")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after so many seconds")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(args)
    try:
        for type in args.types:
            bench.type(type)
        if "torch" in args.peers:
            bench.autograd()
    finally:
        bench.close()


if __name__ == "__main__":
    main()
