"""Paged attention of one layer: decode rows by KV bytes read, prefill chunks by arithmetic. Qwen3-30B-A3B's heads.

python -m benchmarks.kernels.attention [--threads N] [--isa avx2] [--dtype float32] [--kv bfloat16 int8]
    [--products float32]

Arithmetic is compared with the peak of what is multiplied: float32 or bf16 (docs/native.md, Attention).
Caches of several types are measured in turn, the best of the rounds counts; the last column is the time over that of
the first type.
"""

from __future__ import annotations

import math
from array import array
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.probe import arguments, best_s, line, make_pool, measure_peaks
from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.rotation import Rotation
from engine.attention.base import BLOCK_SIZE, BatchLayout
from engine.attention.native import NativeAttention

HEADS, KV_HEADS, HEAD_DIM = 32, 4, 128
SPEC = GroupedQuery(HEADS, KV_HEADS, HEAD_DIM, Rotation(HEAD_DIM, 1e6, 40960))
CACHE_BYTES = 256 << 20  # layers are added until the cache exceeds any processor's, and visited in turn


def filled(
    rows: list[tuple[int, int]], layers: int, dtype: torch.dtype, kv: torch.dtype, pool: Any, isa: str, products: str
) -> Any:
    """A backend of so many layers with these rows planned. Every position is written once, so that no page is still
    the kernel's zero page."""
    starts, tables, blocks = [0], [], 0
    for tokens, context in rows:
        starts.append(starts[-1] + tokens)
        used = -(-context // BLOCK_SIZE)
        tables.append(array("i", range(blocks, blocks + used)))
        blocks += used
    backend = NativeAttention(SPEC, range(layers), blocks, dtype, pool, isa, kv_dtype=kv, products=products)
    empty = torch.zeros(0, dtype=torch.int64)
    for (_, context), table in zip(rows, tables, strict=True):
        for start in range(0, context, 512):
            n = min(512, context - start)
            backend.plan(BatchLayout([0, n], [start + n], [table], empty, empty))
            new = torch.randn(n, KV_HEADS, HEAD_DIM).to(dtype)
            for layer in range(layers):
                backend.forward(layer, torch.zeros(n, HEADS, HEAD_DIM, dtype=dtype), new, new)
    backend.plan(BatchLayout(starts, [context for _, context in rows], tables, empty, empty))
    return backend


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the rows")
    parser.add_argument(
        "--kv", nargs="+", choices=("bfloat16", "float32", "int8"), help="of the cache; default: --dtype"
    )
    parser.add_argument(
        "--products", choices=("float32", "bfloat16"), default="", help="on AVX-512; default: those of this CPU"
    )
    parser.add_argument("--cases", nargs="+", type=int, default=list(range(13)), help="by their place; default: all")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype: torch.dtype = getattr(torch, args.dtype)
    types: list[torch.dtype] = [getattr(torch, name) for name in args.kv or [args.dtype]]
    pool = make_pool(args.threads)
    peaks = measure_peaks(pool, args.isa)
    print(peaks)
    cases = [[(1, context)] * rows for rows in (1, 8, 32) for context in (128, 1024, 4096)]
    cases += [[(512, 512)], [(512, 4096)], [(2048, 2048)], [(1, 1024)] * 16 + [(256, 1024)]]
    for rows in [cases[i] for i in args.cases]:
        positions, tokens = sum(context for _, context in rows), sum(n for n, _ in rows)
        layers = max(1, min(64, CACHE_BYTES // (positions * KV_HEADS * HEAD_DIM * 4)))
        backends = [filled(rows, layers, dtype, kv, pool, args.isa, args.products) for kv in types]
        q, k, v = (torch.randn(tokens, heads, HEAD_DIM).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))

        def run(backend: Any, layers: int = layers, q: Any = q, k: Any = k, v: Any = v) -> None:
            for layer in range(layers):
                backend.forward(layer, q, k, v)

        best = [math.inf] * len(types)
        for _ in range(args.repeats):
            for i, backend in enumerate(backends):
                best[i] = min(best[i], best_s(pool, 1, partial(run, backend)) / layers)
        # scores and values: a multiply and an add each, over the positions a query sees
        operations = sum(n * (context - (n - 1) / 2) for n, context in rows) * HEADS * HEAD_DIM * 4
        for kv, seconds, backend in zip(types, best, backends, strict=True):
            head_bytes = HEAD_DIM + 4 if kv == torch.int8 else HEAD_DIM * kv.itemsize
            what = f"{len(rows)} x {rows[0][0]} token(s) at {rows[0][1]}, {str(kv).removeprefix('torch.')}"
            if len({n for n, _ in rows}) > 1:
                what = f"{len(rows) - 1} decode rows at {rows[0][1]} + {rows[-1][0]} tokens"
            kind = "bf16" if backend.kernel.products == "bfloat16" else "f32"
            text = line(what, seconds, positions * KV_HEADS * head_bytes * 2, operations, peaks, kind)
            print(f"{text}  {seconds / best[0]:.2f}", flush=True)


if __name__ == "__main__":
    main()
