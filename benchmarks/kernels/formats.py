"""All formats of weights side by side: bytes, error and speed on one thread, each beside Q4_K in the same rounds.

python -m benchmarks.kernels.formats [--isa avx2] [--types Q2_K F8_E4M3] [--rows 1 32] [--megabytes 64]

A round multiplies a format's copies and Q4_K's by turns, in seconds of this thread's CPU time, so that a busy machine
slows both; the ratio is the median of the rounds. `own`: packed bytes against those of the blocks that are packed.
`error`: mean |d| / mean |ref| of products of the blocks' float32 values and activations of a normal distribution;
`llama.cpp`: of the rounding of activations in its own products of that type.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.kernels.probe import arguments
from engine.weights.packed import packed_format
from native import _native
from testing.models.block_types import encode
from testing.models.quantised import made_blocks

GGUF = (
    "F16",
    "BF16",
    "Q8_0",
    "Q6_K",
    "Q5_K",
    "Q5_1",
    "Q5_0",
    "Q4_K",
    "Q4_1",
    "Q4_0",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
    "Q3_K",
    "Q2_K",
    "IQ3_S",
    "IQ3_XXS",
    "IQ2_S",
    "IQ2_XS",
    "IQ2_XXS",
)
MADE = ("F8_E4M3", "INT4_G32", "INT4_G128")
N, K, ERROR_ROWS = 1024, 2048, 8
BESIDE = "Q4_K"


@dataclass
class Weight:
    """Copies of one packed matrix [N, K], `values` what it stands for; `num_bytes`: of one in the file."""

    type: str
    form: str
    num_bytes: int
    values: npt.NDArray[np.float64]
    copies: list[npt.NDArray[np.uint8]]

    def run(self, isa: str, x: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
        for packed in self.copies:
            _native.dot(isa, self.form, packed.ctypes.data, N, K, x.ctypes.data, len(x), out.ctypes.data)

    def seconds(self, isa: str, x: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> float:
        """Of this thread, for one copy."""
        start = time.thread_time()
        self.run(isa, x, out)
        return (time.thread_time() - start) / len(self.copies)


def weight(type: str, pool: Any, num_bytes: int) -> Weight:
    """With copies of so many bytes in all."""
    values = torch.randn(N, K, generator=torch.Generator().manual_seed(1)) * 0.02
    data, exact = made_blocks(values, type) if type in MADE else encode(values, type)
    raw, form = np.ascontiguousarray(data).view(np.uint8), packed_format(type, "bf16")
    size = _native.packed_size(form, N, K)
    copies: list[npt.NDArray[np.uint8]] = []
    for _ in range(max(1, num_bytes // size)):
        memory = np.zeros(size + 64, np.uint8)
        packed = memory[-memory.ctypes.data % 64 :][:size]
        if copies:
            packed[:] = copies[0]
        else:
            _native.pack(pool, type, form, raw.ctypes.data, N, K, packed.ctypes.data)
        copies.append(packed)
    return Weight(type, form, raw.nbytes, exact.double().numpy(), copies)


def relative(got: npt.NDArray[Any], exact: npt.NDArray[np.float64]) -> float:
    return float(np.abs(got - exact).mean() / np.abs(exact).mean())


def errors(w: Weight, isa: str) -> tuple[float, float | None]:
    """Of our products, and of llama.cpp's rounding of activations: int8 per 256 values for types in blocks of so many,
    per 32 with a half-precision scale for others; None where it has no such type."""
    x = np.random.default_rng(2).standard_normal((ERROR_ROWS, K)).astype(np.float32)
    exact, out = x.astype(np.float64) @ w.values.T, np.empty((ERROR_ROWS, N), np.float32)
    w.run(isa, x, out)
    if w.type in (*MADE, "F16", "BF16"):
        return relative(out, exact), None
    long = w.type.endswith("_K") or w.type.startswith(("IQ2", "IQ3", "IQ4_XS"))
    parts = x.astype(np.float64).reshape(ERROR_ROWS, -1, 256 if long else 32)
    scale = np.abs(parts).max(-1, keepdims=True) / 127
    rounded = np.rint(parts / scale) * (scale if long else scale.astype(np.float16).astype(np.float64))
    return relative(out, exact), relative(rounded.reshape(x.shape) @ w.values.T, exact)


def speed(w: Weight, rows: int, isa: str, rounds: int) -> float:
    """Operations a second."""
    x = np.random.default_rng(3).standard_normal((rows, K)).astype(np.float32)
    out = np.empty((rows, N), np.float32)
    w.run(isa, x, out)
    return 2 * N * K * rows / statistics.median(w.seconds(isa, x, out) for _ in range(rounds))


def ratio(w: Weight, other: Weight, rows: int, isa: str, rounds: int) -> tuple[float, float]:
    """(weights a second against the other's, bytes a second against the other's)."""
    x = np.random.default_rng(3).standard_normal((rows, K)).astype(np.float32)
    out = np.empty((rows, N), np.float32)
    w.run(isa, x, out)
    other.run(isa, x, out)
    faster = statistics.median(other.seconds(isa, x, out) / w.seconds(isa, x, out) for _ in range(rounds))
    return faster, faster * w.copies[0].nbytes / other.copies[0].nbytes


def main() -> None:
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--types", nargs="+", choices=[*GGUF, *MADE], default=[*GGUF, *MADE])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--megabytes", type=int, default=64, help="of each format's copies: more than the caches hold")
    args = parser.parse_args()
    pool = _native.WorkerPool([[0]])
    beside = weight(BESIDE, pool, args.megabytes << 20)
    alone = (f"{rows} rows {speed(beside, rows, args.isa, args.repeats) / 1e9:.0f} Gop/s" for rows in args.rows)
    print(f"isa {_native.choose_isa(args.isa)}; speed against {BESIDE}: weights (bytes) a second")
    print(f"{BESIDE}: {', '.join(alone)}")
    head = ["type", "packed as", "bits", "own", "error", "llama.cpp", *(f"{rows} rows" for rows in args.rows)]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for type in args.types:
        w = weight(type, pool, args.megabytes << 20)
        ours, theirs = errors(w, args.isa)
        size = w.copies[0].nbytes
        cells = [type, f"`{w.form}`", f"{8 * size / (N * K):.2f}", f"{size / w.num_bytes:.2f}", f"{ours:.1e}"]
        cells.append("" if theirs is None else f"{theirs:.1e}")
        for rows in args.rows:
            weights, num_bytes = ratio(w, beside, rows, args.isa, args.repeats)
            cells.append(f"{weights:.2f} ({num_bytes:.2f})")
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
