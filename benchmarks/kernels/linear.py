"""Projections of Qwen3-30B-A3B, per format and number of rows: bytes read, operations, share of the peaks.

python -m benchmarks.kernels.linear [--threads N] [--isa avx2] [--types BF16 Q8_0] [--rows 1 8] [--adapters 4]
"""

from __future__ import annotations

import torch

from benchmarks.kernels.probe import arguments, best_s, line, make_pool, measure_peaks
from benchmarks.models.blocks import random_bytes
from engine.linear.base import LoraBatch
from engine.linear.native import NativeLinear, NativeLinearBackend
from engine.lora.adapter import LoraPair
from engine.weights.store import WeightTensor

SHAPES = {"q_proj": (4096, 2048), "o_proj": (2048, 4096), "k_proj": (512, 2048), "lm_head": (151936, 2048)}
CACHE_BYTES = 256 << 20  # so many bytes of copies are visited in turn: no cache helps
RANK = 16


def random_weight(type: str, n: int, k: int) -> WeightTensor:
    """A matrix [n, k] of `random_bytes`."""
    return WeightTensor("w", (n, k), type, random_bytes(type, n, k))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--types", nargs="+", default=["BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 512])
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["q_proj", "k_proj", "o_proj"])
    parser.add_argument("--adapters", type=int, default=0, help=f"rows are spread over so many rank-{RANK} adapters")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pool = make_pool(args.threads)
    peaks = measure_peaks(pool, args.isa)
    print(peaks)
    backend = NativeLinearBackend(torch.bfloat16, pool, args.isa)
    for type in args.types:
        for shape in args.shapes:
            n, k = SHAPES[shape]
            weight = random_weight(type, n, k)
            copies: list[NativeLinear] = [backend.load(shape, weight, None)]
            while sum(c.num_bytes for c in copies) < CACHE_BYTES:
                copies.append(backend.load(shape, weight, None))
            for slot in range(1, args.adapters + 1):
                pair = LoraPair(torch.randn(RANK, k).bfloat16(), torch.randn(n, RANK).bfloat16(), 1.0)
                for copy in copies:
                    copy.set_adapter(slot, pair)
            for rows in args.rows:
                x = torch.randn(rows, k).bfloat16()
                lora = None
                if args.adapters:
                    slots = torch.arange(rows, dtype=torch.int32) % args.adapters + 1
                    lora = LoraBatch(slots, [(int(s), (slots == s).nonzero()[:, 0]) for s in slots.unique()])

                def run(
                    copies: list[NativeLinear] = copies, x: torch.Tensor = x, lora: LoraBatch | None = lora
                ) -> None:
                    for copy in copies:
                        copy(x, lora)

                seconds = best_s(pool, args.repeats, run) / len(copies)
                kind = "bf16" if copies[0].format == "bf16" else "int8"
                what = f"{type} {shape} [{n}, {k}] x {rows}"
                print(line(what, seconds, copies[0].num_bytes, 2.0 * rows * n * k, peaks, kind), flush=True)


if __name__ == "__main__":
    main()
