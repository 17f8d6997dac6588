"""Paged attention of one layer: decode rows by KV bytes read, prefill chunks by arithmetic. Qwen3-30B-A3B's heads, or
(`--latent`) DeepSeek-V2-Lite's, absorbed: 16 heads over latents of 512 + 64 values.

python -m benchmarks.kernels.attention [--threads N] [--isa avx2] [--dtype float32] [--kv bfloat16 int8]
    [--products int16] [--latent]

Arithmetic is compared with the peak of what is multiplied: float32, bf16 or int16 (docs/native.md, Attention).
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
from engine.architectures.parts.mla import Latent
from engine.architectures.parts.rotation import Rotation
from engine.attention.base import BLOCK_SIZE, BatchLayout
from engine.attention.native import NativeAttention

GROUPED = GroupedQuery(32, 4, 128, Rotation(128, 1e6, 40960))
LATENT = Latent(16, None, 512, 128, 128, Rotation(64, 1e4, 40960))
CACHE_BYTES = 256 << 20  # layers are added until the cache exceeds any processor's, and visited in turn


def sizes(spec: GroupedQuery | Latent) -> tuple[int, int, int]:
    """Heads of keys, values of a query and of a result."""
    if isinstance(spec, Latent):
        return 1, spec.width, spec.kv_rank
    return spec.kv_heads, spec.head_dim, spec.head_dim


def filled(
    spec: GroupedQuery | Latent,
    rows: list[tuple[int, int]],
    layers: int,
    dtype: torch.dtype,
    kv: torch.dtype,
    pool: Any,
    isa: str,
    products: str,
) -> Any:
    """A backend of so many layers with these rows planned. Every position is written once, so that no page is still
    the kernel's zero page."""
    starts, tables, blocks = [0], [], 0
    kv_heads, width, _ = sizes(spec)
    for tokens, context in rows:
        starts.append(starts[-1] + tokens)
        used = -(-context // BLOCK_SIZE)
        tables.append(array("i", range(blocks, blocks + used)))
        blocks += used
    backend = NativeAttention(spec, range(layers), blocks, dtype, pool, isa, kv_dtype=kv, products=products)
    empty = torch.zeros(0, dtype=torch.int64)
    for (_, context), table in zip(rows, tables, strict=True):
        for start in range(0, context, 512):
            n = min(512, context - start)
            backend.plan(BatchLayout([0, n], [start + n], [table], empty, empty))
            new = torch.randn(n, kv_heads, width).to(dtype)
            for layer in range(layers):
                backend.forward(layer, torch.zeros(n, spec.heads, width, dtype=dtype), *kept(spec, new))
    backend.plan(BatchLayout(starts, [context for _, context in rows], tables, empty, empty))
    return backend


def kept(spec: GroupedQuery | Latent, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values: of latents one vector, whose first part is the values."""
    return new, new[..., : sizes(spec)[2]]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the rows")
    parser.add_argument(
        "--kv", nargs="+", choices=("bfloat16", "float32", "int8"), help="of the cache; default: --dtype"
    )
    parser.add_argument(
        "--products", choices=("int16", "bfloat16"), default="", help="on AVX-512; default: those of this CPU"
    )
    parser.add_argument("--cases", nargs="+", type=int, default=list(range(14)), help="by their place; default: all")
    parser.add_argument("--latent", action="store_true", help="heads over latents; int8 is no type of their cache")
    args = parser.parse_args()
    torch.set_num_threads(1)
    spec: GroupedQuery | Latent = LATENT if args.latent else GROUPED
    kv_heads, width, out_width = sizes(spec)
    dtype: torch.dtype = getattr(torch, args.dtype)
    types: list[torch.dtype] = [getattr(torch, name) for name in args.kv or [args.dtype]]
    pool = make_pool(args.threads)
    peaks = measure_peaks(pool, args.isa)
    print(peaks)
    cases = [[(1, context)] * rows for rows in (1, 8, 32) for context in (128, 1024, 4096)]
    cases += [[(512, 512)], [(512, 4096)], [(2048, 2048)], [(1, 1024)] * 16 + [(256, 1024)], [(512, 8192)]]
    for rows in [cases[i] for i in args.cases]:
        positions, tokens = sum(context for _, context in rows), sum(n for n, _ in rows)
        layers = max(1, min(64, CACHE_BYTES // (positions * kv_heads * width * 4)))
        backends = [filled(spec, rows, layers, dtype, kv, pool, args.isa, args.products) for kv in types]
        q, new = (torch.randn(tokens, heads, width).to(dtype) for heads in (spec.heads, kv_heads))
        k, v = kept(spec, new)

        def run(backend: Any, layers: int = layers, q: Any = q, k: Any = k, v: Any = v) -> None:
            for layer in range(layers):
                backend.forward(layer, q, k, v)

        best = [math.inf] * len(types)
        for _ in range(args.repeats):
            for i, backend in enumerate(backends):
                best[i] = min(best[i], best_s(pool, 1, partial(run, backend)) / layers)
        # scores and values: a multiply and an add each, over the positions a query sees
        operations = sum(n * (context - (n - 1) / 2) for n, context in rows) * spec.heads * (width + out_width) * 2
        for kv, seconds, backend in zip(types, best, backends, strict=True):
            head_bytes = width + 4 if kv == torch.int8 else width * kv.itemsize
            position_bytes = head_bytes if args.latent else 2 * kv_heads * head_bytes
            what = f"{len(rows)} x {rows[0][0]} token(s) at {rows[0][1]}, {str(kv).removeprefix('torch.')}"
            if len({n for n, _ in rows}) > 1:
                what = f"{len(rows) - 1} decode rows at {rows[0][1]} + {rows[-1][0]} tokens"
            kind = {"bfloat16": "bf16", "int16": "int16", "float32": "f32"}[backend.kernel.products]
            text = line(what, seconds, positions * position_bytes, operations, peaks, kind)
            print(f"{text}  {seconds / best[0]:.2f}", flush=True)


if __name__ == "__main__":
    main()
