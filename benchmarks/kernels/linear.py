"""Projections of Qwen3-30B-A3B, per format and number of rows: bytes read, operations, share of the peaks.

python -m benchmarks.kernels.linear [--threads N] [--isa avx2] [--types BF16 Q8_0] [--rows 1 8] [--adapters 4]
"""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import torch

from benchmarks.kernels.probe import arguments, best_s, line, make_pool, measure_peaks
from engine.linear.base import LoraBatch
from engine.linear.native import NativeLinear, NativeLinearBackend
from engine.lora.adapter import LoraPair
from engine.weights.store import WeightTensor

SHAPES = {"q_proj": (4096, 2048), "o_proj": (2048, 4096), "k_proj": (512, 2048), "lm_head": (151936, 2048)}
CACHE_BYTES = 256 << 20  # so many bytes of copies are visited in turn: no cache helps
RANK = 16
_SCALES = {  # byte offsets of a block's; 0 where they are not here
    "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,),
    **dict.fromkeys(("Q4_K", "Q5_K", "Q4_1", "Q5_1"), (0, 2)),
}  # fmt: skip


def random_weight(type: str, n: int, k: int) -> WeightTensor:
    """A matrix [n, k] of `random_bytes`."""
    return WeightTensor("w", (n, k), type, random_bytes(type, n, k))


def random_bytes(type: str, n: int, k: int) -> npt.NDArray[np.uint8]:
    """Random quants under scales of about 0.01; bf16 values of about 0.02."""
    if type == "BF16":
        values: npt.NDArray[np.uint8] = torch.randn(n, k).mul_(0.02).bfloat16().view(torch.uint8).numpy().ravel()
        return values
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    blocks = np.random.default_rng(0).integers(0, 256, (n * k // block, size), dtype=np.uint8)
    if type == "MXFP4":
        blocks[:, 0] = 120
    for offset in _SCALES.get(type, (0,)) if type != "MXFP4" else ():
        blocks[:, offset : offset + 2] = np.array([0.01], np.float16).view(np.uint8)
    return blocks.ravel()


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
