"""flashinfer's attention alone: prefill by fa2 and fa3, and decode from a bf16 and an fp8 cache.

    python -m benchmarks.gpu.attention --out FILE

Microseconds a layer of 32 query and 4 KV heads of 128, by CUDA events, plan apart. A prefill step is one chunk at the
end of its context, beside decode rows of 2,048 positions where it says so: fa2 and fa3 compute all of it, `auto` is the
engine's way. `max_error` is the largest mean|difference| / mean|value| between that and fa2's results.
"""

from __future__ import annotations

import argparse
from array import array
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from engine.architectures.parts.gqa import GroupedQuery
from engine.attention.base import BLOCK_SIZE, BatchLayout
from engine.attention.flashinfer import FlashInferAttention, make_workspace
from testing.models.shapes import config

CONFIG = config(num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=4, head_dim=128)
CHUNKS = [
    (32, 0),
    (64, 0),
    (128, 0),
    (256, 0),
    (512, 0),
    (512, 2048),
    (2048, 0),
    (2048, 6144),
    (8192, 0),
    (8192, 24576),
]
DECODE = [(1, 2048), (16, 2048), (64, 2048), (16, 8192)]
BLOCKS = 8192
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def layout(rows: list[tuple[int, int]], padded: bool = False, device: str = "cuda") -> BatchLayout:
    """(tokens, positions) of each row."""
    starts, tables, positions, slots, free = [0], [], [], [], 0
    for new, length in rows:
        pages = -(-length // BLOCK_SIZE)
        tables.append(array("i", [(7 * b) % BLOCKS for b in range(free, free + pages)]))
        free += pages
        starts.append(starts[-1] + new)
        for position in range(length - new, length):
            positions.append(position)
            slots.append(tables[-1][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
    at = [torch.tensor(values, dtype=torch.int64, device=device) for values in (positions, slots)]
    return BatchLayout(starts, [length for _, length in rows], tables, at[0], at[1], padded)


def microseconds(attention: Any, step: BatchLayout, q: torch.Tensor, kv: torch.Tensor) -> tuple[float, torch.Tensor]:
    attention.plan(step)
    out = attention.forward(0, q, kv, kv)
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(4):
            attention.forward(0, q, kv, kv)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 250)
    return min(times), out


def values(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    q, kv = (torch.randn(tokens, heads, 128, device="cuda", dtype=BF16) for heads in (32, 4))
    return q, kv


def make(prefill: str, kv: torch.dtype) -> FlashInferAttention:
    spec = CONFIG.layers[0].attention
    if not isinstance(spec, GroupedQuery):
        raise TypeError(type(spec).__name__)
    device = torch.device("cuda")
    made = FlashInferAttention(
        spec, [0], BLOCKS, BF16, device, 64, 512, workspace=make_workspace(device), kv_dtype=kv, prefill=prefill
    )
    for cache in made.cache[0]:
        cache.copy_(torch.randn(cache.shape, device="cuda", dtype=BF16).to(kv))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    fa2, auto, fa3, fp8 = make("fa2", BF16), make("auto", BF16), make("auto", BF16), make("fa2", FP8)
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "notes": list(auto.notes)}
    has_fa3, prefill, decode = fa3._long_prefill is not None, [], []
    fa3._prefill, fa3._long_prefill = fa3._long_prefill, None  # for chunks of any size, to find where it pays
    auto.cache = fa3.cache = fa2.cache
    for rows in [[(new, before + new)] for new, before in CHUNKS] + [
        [(1, 2048)] * 31 + [(new, new)] for new in (64, 128, 256, 512, 2048)
    ]:
        step = layout(rows)
        q, kv = values(step.num_tokens)
        line: dict[str, Any] = {"chunk": rows[-1][0], "context": rows[-1][1], "decode_rows": len(rows) - 1}
        line["fa2_us"], want = microseconds(fa2, step, q, kv)
        line["fp8_us"] = microseconds(fp8, step, q, kv)[0]
        if has_fa3:
            line["fa3_us"] = microseconds(fa3, step, q, kv)[0]
        line["auto_us"], got = microseconds(auto, step, q, kv)
        line["error"] = float((got.float() - want.float()).abs().mean() / want.float().abs().mean())
        prefill.append(line)
        print(line, flush=True)
    for count, length in DECODE:
        step = layout([(1, length)] * count, padded=True)
        q, kv = values(count)
        line = {"rows": count, "context": length}
        line["bf16_us"], line["fp8_us"] = (microseconds(made, step, q, kv)[0] for made in (fa2, fp8))
        decode.append(line)
        print(line, flush=True)
    results |= {"prefill": prefill, "decode": decode, "max_error": max(line["error"] for line in prefill)}
    if args.out:
        record.write(args.out, results)


if __name__ == "__main__":
    main()
