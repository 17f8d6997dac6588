"""Paged attention of one layer: decode rows by KV bytes read, prefill chunks by arithmetic. Qwen3-30B-A3B's heads.

python -m benchmarks.kernels.attention [--threads N] [--isa avx2] [--dtype float32]
"""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.kernels.probe import arguments, best_s, line, make_pool, measure_peaks
from engine.attention.base import BLOCK_SIZE, BatchLayout
from engine.attention.native import NativeAttention
from engine.model.config import ModelConfig

HEADS, KV_HEADS, HEAD_DIM = 32, 4, 128
CACHE_BYTES = 256 << 20  # layers are added until the cache exceeds any processor's, and visited in turn


def model(layers: int) -> ModelConfig:
    values = {f.name: 0 for f in dataclasses.fields(ModelConfig)} | {
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
    }
    return ModelConfig(**values)  # type: ignore[arg-type]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32
    kind = "bf16" if dtype == torch.bfloat16 else "f32"
    pool = make_pool(args.threads)
    peaks = measure_peaks(pool, args.isa)
    print(peaks)
    cases = [[(1, context)] * rows for rows in (1, 8, 32) for context in (128, 1024, 4096)]
    cases += [[(512, 512)], [(512, 4096)], [(2048, 2048)], [(1, 1024)] * 16 + [(256, 1024)]]
    for rows in cases:
        bytes_per_layer = sum(context for _, context in rows) * KV_HEADS * HEAD_DIM * 2 * dtype.itemsize
        layers = max(1, min(64, CACHE_BYTES // bytes_per_layer))
        starts, tables, blocks = [0], [], 0
        for tokens, context in rows:
            starts.append(starts[-1] + tokens)
            used = -(-context // BLOCK_SIZE)
            tables.append(tuple(range(blocks, blocks + used)))
            blocks += used
        backend = NativeAttention(model(layers), blocks, dtype, pool, args.isa)
        q, k, v = (torch.randn(starts[-1], heads, HEAD_DIM).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
        contexts = [context for _, context in rows]
        empty = torch.zeros(0, dtype=torch.int64)
        fill = max(range(len(rows)), key=lambda r: contexts[r])
        for r in range(len(rows)):  # every position is written once, so that no page is still the kernel's zero page
            for start in range(0, contexts[r], 512):
                n = min(512, contexts[r] - start)
                layout = BatchLayout([0, n], [start + n], [tables[r]], empty, empty)
                backend.plan(layout)
                kv = torch.randn(n, KV_HEADS, HEAD_DIM).to(dtype)
                for layer in range(layers):
                    backend.forward(layer, torch.zeros(n, HEADS, HEAD_DIM, dtype=dtype), kv, kv)
        backend.plan(BatchLayout(starts, contexts, tables, empty, empty))

        def run(backend: NativeAttention = backend, layers: int = layers) -> None:
            for layer in range(layers):
                backend.forward(layer, q, k, v)  # noqa: B023

        seconds = best_s(pool, args.repeats, run) / layers
        # scores and values: a multiply and an add each, over the positions a query sees
        operations = sum(n * (context - (n - 1) / 2) for n, context in rows) * HEADS * HEAD_DIM * 4
        what = f"{len(rows)} x {rows[0][0]} token(s) at {contexts[fill]}"
        if len({n for n, _ in rows}) > 1:
            what = f"{len(rows) - 1} decode rows at {contexts[0]} + {rows[-1][0]} tokens"
        print(line(what, seconds, bytes_per_layer, operations, peaks, kind), flush=True)


if __name__ == "__main__":
    main()
