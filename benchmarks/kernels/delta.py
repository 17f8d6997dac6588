"""Gated delta nets of one layer: decode rows by bytes of states, prefill by arithmetic. Qwen3.5-35B-A3B's heads.

python -m benchmarks.kernels.delta [--threads N] [--isa avx2]

A state is read and written once a step, 4 bytes a value; the share is of the read bandwidth, and writing takes some of
it. Operations are those of the products that chunks of 64 positions need, halves of triangles where no more is wanted,
those of queries and keys once for a head of keys; convolution, gates and norm take time and are not counted.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.kernels.probe import arguments, best_s, line, make_pool, measure_peaks
from engine.architectures.parts.delta import DeltaNet
from engine.attention.base import BatchLayout
from engine.attention.delta import CHUNK, DeltaInputs, DeltaVectors, StateSlots
from engine.attention.native_delta import NativeDeltaNet
from scheduler.plan import NO_STATE, RowState

NET = DeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4, fused=False, fused_gates=False)
LAYERS = 16  # visited in turn: no cache holds the states of all
POSITION = 4096  # of decode rows


def operations(net: DeltaNet) -> int:
    """A multiply and an add each, of a position in a chunk."""
    d, e = net.key_dim, net.value_dim
    of_values = CHUNK * (d + e) // 2 + 3 * d * e + CHUNK * e // 2  # the solve, products with states, with the triangle
    return 2 * (net.value_heads * of_values + net.key_heads * CHUNK * d)


def layout(rows: int, tokens: int) -> BatchLayout:
    """Decode rows behind their states, or prompts that begin."""
    begins = POSITION if tokens == 1 else 0
    states = [RowState(slot, NO_STATE if tokens > 1 else slot) for slot in range(rows)]
    empty = torch.zeros(0, dtype=torch.int64)
    starts = [row * tokens for row in range(rows + 1)]
    return BatchLayout(starts, [begins + tokens] * rows, [], empty, empty, states=states)


def inputs(tokens: int) -> DeltaInputs:
    wide = [torch.randn(tokens, width).bfloat16() for width in (NET.channels, NET.value_width)]
    return DeltaInputs(wide, [torch.randn(tokens, NET.value_heads) for _ in range(2)])


def run(backend: NativeDeltaNet, given: DeltaInputs, vectors: DeltaVectors) -> None:
    for layer in range(LAYERS):
        backend.mix(layer, given, vectors)


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    pool = make_pool(args.threads)
    peaks = measure_peaks(pool, args.isa)
    print(peaks)
    vectors = DeltaVectors(
        conv=torch.randn(NET.kernel, NET.channels) / 2, decay=-torch.rand(NET.value_heads) / 4,
        dt_bias=torch.zeros(NET.value_heads), norm=torch.ones(NET.value_dim), norm_eps=1e-6,
    )  # fmt: skip
    state_bytes = 2 * 4 * NET.value_heads * NET.key_dim * NET.value_dim  # read and written
    for rows, tokens in ((1, 1), (8, 1), (32, 1), (1, 512), (1, 2048), (4, 512)):
        backend = NativeDeltaNet(NET, range(LAYERS), StateSlots(rows), pool, args.isa)
        count = rows * tokens
        backend.plan(layout(rows, 2))
        run(backend, inputs(2 * rows), vectors)  # every state is written once
        backend.plan(layout(rows, tokens))
        seconds = best_s(pool, args.repeats, partial(run, backend, inputs(count), vectors)) / LAYERS
        what = f"{rows} x {tokens} token(s)"
        print(line(what, seconds, rows * state_bytes, count * operations(NET), peaks, "f32"), flush=True)


if __name__ == "__main__":
    main()
