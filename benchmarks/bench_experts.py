"""One layer of Qwen3-30B-A3B's experts, per packed format and number of rows: share of the roofs measured just before.

python -m benchmarks.bench_experts [--threads N] [--isa avx2] [--types BF16 Q8_0] [--rows 1 8] [--adapters 4]

Rows choose experts uniformly at random, several draws a measurement, so that no cache holds what a call reads. Bytes
are those of the distinct experts chosen (weights only), operations those of their products.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.bench_linear import random_weight
from benchmarks.probe import arguments, best_s, line, make_pool, measure_roofs
from engine.experts.base import ExpertBuffers
from native import _native

HIDDEN, INTERMEDIATE, TOP_K = 2048, 768, 8
RANK = 16
MIXES = {"Q4_K_M": ("Q4_K", "Q4_K", "Q6_K")}  # the half of its layers whose down is Q6_K


def make_layer(pool: Any, type: str, experts: int, adapters: int) -> Any:
    """A layer whose experts all hold the same random values, each in memory of its own."""
    types = MIXES.get(type, (type, type, type))
    forms = [_native.format_of(t) for t in types]
    layer = _native.ExpertLayer(experts, HIDDEN, INTERMEDIATE, forms, pool.groups)
    for projection, kind in enumerate(types):
        n, k = (HIDDEN, INTERMEDIATE) if projection == 2 else (INTERMEDIATE, HIDDEN)
        data = random_weight(kind, n, k).data
        layer.load(pool, projection, kind, 0, [data.ctypes.data] * experts)
    for slot in range(1, adapters + 1):
        a = [torch.randn(experts, RANK, k).bfloat16() for k in (HIDDEN, HIDDEN, INTERMEDIATE)]
        b = [torch.randn(experts, n, RANK).bfloat16() for n in (INTERMEDIATE, INTERMEDIATE, HIDDEN)]
        layer.set_lora(pool, slot, RANK, True, [t.data_ptr() for t in a], [t.data_ptr() for t in b], [1.0] * 3)
    return layer


def make_task(runner: Any, layer: Any, rows: int, experts: int, adapters: int, seed: int) -> tuple[Any, ExpertBuffers]:
    g = torch.Generator().manual_seed(seed)
    b = ExpertBuffers.allocate(rows, TOP_K, HIDDEN, torch.bfloat16)
    b.bsz[0] = rows
    b.hidden.copy_(torch.randn(rows, HIDDEN, generator=g))
    b.ids.copy_(torch.rand(rows, experts, generator=g).topk(TOP_K).indices)
    b.weights.fill_(1 / TOP_K)
    if adapters:
        b.slots.copy_(torch.arange(rows) % adapters + 1)
    pointers = [t.data_ptr() for t in (b.bsz, b.ids, b.weights, b.slots, b.hidden, b.out)]
    return _native.MoeTask(runner, layer, *pointers, rows, TOP_K, True), b


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--types", nargs="+", default=["BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q4_K_M"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 256, 512])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--adapters", type=int, default=0, help=f"rows are spread over so many rank-{RANK} adapters")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pool = make_pool(args.threads)
    runner = _native.MoeRunner(pool, args.isa)
    for type in args.types:
        layer = make_layer(pool, type, args.experts, args.adapters)
        expert_bytes = layer.num_bytes / args.experts
        roofs = measure_roofs(pool, args.isa)
        print(roofs, flush=True)
        for rows in args.rows:
            draws = max(2, min(8, 256 // rows))
            made = [make_task(runner, layer, rows, args.experts, args.adapters, seed) for seed in range(draws)]
            distinct = sum(len(b.ids.unique()) for _, b in made) / draws

            def run(tasks: list[Any] = [task for task, _ in made]) -> None:  # noqa: B006
                for task in tasks:
                    task.run()

            seconds = best_s(pool, args.repeats, run) / draws
            operations = 2.0 * rows * TOP_K * 3 * HIDDEN * INTERMEDIATE
            kind = "bf16" if type == "BF16" else "int8"
            print(line(f"{type} x {rows} rows", seconds, distinct * expert_bytes, operations, roofs, kind), flush=True)
        del layer, made


if __name__ == "__main__":
    main()
