"""flashinfer's paged attention against plain torch: both prefill kernels and cache types, windows and sinks, decode
rows in graphs."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.architectures.parts.gqa import GroupedQuery
from engine.attention.base import BLOCK_SIZE, BatchLayout
from engine.attention.flashinfer import FA3_ROWS, FlashInferAttention, fa3_limit, make_workspace
from engine.attention.reference import ReferenceAttention
from engine.errors import UserError
from testing.models.shapes import config

pytestmark = pytest.mark.gpu
BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
CONFIG = config(num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=2, head_dim=64)
SPEC, LAYERS = CONFIG.layers[0].attention, [0]
SINKS = [0.5, -3.0, 2.0, 6.0, 0.0, 1.0, -1.0, 4.0]
BLOCKS = 64
# A value of random sign and exponent loses 2^-4.5 of itself on average when it is rounded to three bits of mantissa;
# attention's mean over many positions keeps that, relative to a result that shrinks as much.
BOUNDS = {BF16: 0.006, FP8: 0.06}
SINK_BOUNDS = {BF16: 0.008, FP8: 0.08}  # results are rounded twice, and rounded keys change the sinks' shares


def layout(rows: list[tuple[int, int]], device: torch.device, padded: bool = False) -> BatchLayout:
    """(tokens of this step, positions in all) of each row; its blocks are its own, in no order."""
    free = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
    starts, tables, positions, slots = [0], [], [], []
    for new, length in rows:
        table = array("i", [free.pop() for _ in range(-(-length // BLOCK_SIZE))])
        tables.append(table)
        starts.append(starts[-1] + new)
        for position in range(length - new, length):
            positions.append(position)
            slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
    at = [torch.tensor(values, dtype=torch.int64, device=device) for values in (positions, slots)]
    return BatchLayout(starts, [length for _, length in rows], tables, at[0], at[1], padded)


def qkv(tokens: int, device: torch.device, seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    heads = (SPEC.heads, SPEC.kv_heads, SPEC.kv_heads)
    return [torch.randn(tokens, n, SPEC.head_dim, generator=g).to(device, BF16) for n in heads]


def make(device: torch.device, spec: GroupedQuery = SPEC, **options: Any) -> FlashInferAttention:
    workspace = make_workspace(device)
    return FlashInferAttention(spec, LAYERS, BLOCKS, BF16, device, 8, BLOCKS, workspace=workspace, **options)


def with_sinks(device: torch.device, window: int | None, **options: Any) -> tuple[FlashInferAttention, Any]:
    """And the oracle in float32."""
    spec = replace(SPEC, window=window, sinks=True)
    ours, theirs = make(device, spec, **options), ReferenceAttention(spec, LAYERS, BLOCKS, F32, device)
    for attention in (ours, theirs):
        attention.set_sinks(0, torch.tensor(SINKS, device=device))
    return ours, theirs


def run(attention: Any, steps: list[BatchLayout], device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    outs = []
    for number, step in enumerate(steps):
        attention.plan(step)
        outs.append(attention.forward(0, *(t.to(dtype) for t in qkv(step.num_tokens, device, number))).float())
    return outs


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().mean() / want.abs().mean())


STEPS = {
    "short chunks": [[(40, 40), (3, 3), (17, 17)], [(30, 70), (1, 4), (60, 77)]],
    "long chunks": [[(FA3_ROWS + 72, FA3_ROWS + 72), (5, 5)], [(FA3_ROWS, 2 * FA3_ROWS + 72), (1, 6)]],
    "long chunks behind decode rows": [[(20, 20), (9, 9)], [(1, 21), (1, 10), (FA3_ROWS, FA3_ROWS), (3, 3)]],
    "decode rows": [[(40, 40), (3, 3)], [(1, 41), (1, 4)]],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize(("prefill", "kv"), [("fa2", BF16), ("fa3", BF16), ("auto", FP8)], ids=str)
def test_equals_plain_torch(steps: list[list[tuple[int, int]]], prefill: str, kv: torch.dtype) -> None:
    """A later step reads what an earlier one wrote. The oracle is float32 over the same bf16 rows."""
    device = torch.device("cuda")
    limit = fa3_limit(torch.cuda.get_device_capability(), kv)
    if prefill == "fa3" and limit:
        pytest.skip(limit)
    ours = make(device, prefill=prefill, kv_dtype=kv)
    assert ours.kv_bytes_per_token == CONFIG.kv_bytes_per_token(kv.itemsize)
    theirs = ReferenceAttention(SPEC, LAYERS, BLOCKS, F32, device)
    layouts = [layout(rows, device) for rows in steps]
    for got, want in zip(run(ours, layouts, device, BF16), run(theirs, layouts, device, F32), strict=True):
        assert error(got, want) < BOUNDS[kv]
    has_long = prefill == "fa3" and max(new for new, _ in steps[-1]) >= FA3_ROWS
    assert ("fa3" in [wrapper._backend for wrapper, _ in ours._planned]) == has_long


WINDOWED = {
    "prompts longer than the window": [[(40, 40), (3, 3), (17, 17)], [(1, 41), (1, 4), (1, 18)]],
    "prefixes longer than the window": [[(100, 100), (33, 33)], [(20, 120), (7, 40)], [(1, 121), (1, 41)]],
    "long chunks": [[(FA3_ROWS, FA3_ROWS), (5, 5)], [(1, FA3_ROWS + 1), (FA3_ROWS, FA3_ROWS + 5)]],
}


@pytest.mark.parametrize("steps", WINDOWED.values(), ids=WINDOWED)
@pytest.mark.parametrize("window", [None, 1, 16, 33, 128, 1000], ids=str)
@pytest.mark.parametrize(("prefill", "kv"), [("fa2", BF16), ("fa3", BF16), ("auto", FP8)], ids=str)
def test_windows_and_sinks(
    steps: list[list[tuple[int, int]]], window: int | None, prefill: str, kv: torch.dtype
) -> None:
    device = torch.device("cuda")
    if prefill == "fa3" and (limit := fa3_limit(torch.cuda.get_device_capability(), kv)):
        pytest.skip(limit)
    ours, theirs = with_sinks(device, window, prefill=prefill, kv_dtype=kv)
    layouts = [layout(rows, device) for rows in steps]
    pairs = zip(run(ours, layouts, device, BF16), run(theirs, layouts, device, F32), strict=True)
    for number, (got, want) in enumerate(pairs):
        assert error(got, want) < SINK_BOUNDS[kv], f"step {number} of {steps}: {error(got, want):.4f}"


@pytest.mark.parametrize("kv", [BF16, FP8], ids=str)
@pytest.mark.parametrize("window", [None, 16], ids=str)
def test_a_graph_has_windows_and_sinks(window: int | None, kv: torch.dtype) -> None:
    """Captured at one length, replayed at others, within the window and beyond it, and beside a second attention that
    uses the same workspace."""
    device = torch.device("cuda")
    ours, theirs = with_sinks(device, window, prefill="fa2", kv_dtype=kv)
    beside = FlashInferAttention(
        SPEC, LAYERS, BLOCKS, BF16, device, 8, BLOCKS, workspace=ours._workspace, prefill="fa2"
    )
    first = [layout([(60, 60), (7, 7)], device)]
    run(ours, first, device, BF16)
    run(theirs, first, device, F32)
    q, k, v = qkv(2, device, 7)
    graph, out = torch.cuda.CUDAGraph(), torch.empty(0)
    for step in range(4):
        batch = layout([(1, 61 + step), (1, 8 + 4 * step)], device, padded=True)
        if step == 0:
            held = batch
            for attention in (ours, beside):
                attention.plan(held)
                attention.forward(0, q, k, v)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                beside.forward(0, q, k, v)
                out = ours.forward(0, q, k, v)
        held.slot_mapping.copy_(batch.slot_mapping)
        for mine, values in zip((q, k, v), qkv(2, device, 8 + step), strict=True):
            mine.copy_(values)
        for attention in (ours, beside):
            batch.slot_mapping = held.slot_mapping
            attention.plan(batch)
        graph.replay()
        theirs.plan(batch)
        got, want = out.float(), theirs.forward(0, q.float(), k.float(), v.float())
        assert error(got, want) < SINK_BOUNDS[kv], f"replay {step}: {error(got, want):.4f}"


@pytest.mark.parametrize("kv", [BF16, FP8], ids=str)
def test_a_graph_follows_its_plan(kv: torch.dtype) -> None:
    device, first, second = torch.device("cuda"), [(50, 50), (7, 7)], [(1, 51), (1, 8)]
    ours, theirs = make(device, kv_dtype=kv, prefill="fa2"), ReferenceAttention(SPEC, LAYERS, BLOCKS, F32, device)
    run(ours, [layout(first, device)], device, BF16)
    run(theirs, [layout(first, device)], device, F32)
    step = layout(second, device, padded=True)
    q, k, v = qkv(2, device, 7)
    ours.plan(step)
    ours.forward(0, q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ours.forward(0, q, k, v)
    for seed in (8, 9):
        for mine, values in zip((q, k, v), qkv(2, device, seed), strict=True):
            mine.copy_(values)
        ours.plan(step)
        graph.replay()
        theirs.plan(step)
        assert error(out.float(), theirs.forward(0, q.float(), k.float(), v.float())) < BOUNDS[kv]


def test_fp8_is_cut_and_a_nan_stays_in_its_sequence() -> None:
    """A number too large becomes the largest; NaN is stored as NaN and stays in its own sequence."""
    device = torch.device("cuda")
    ours = make(device, kv_dtype=FP8)
    step = layout([(20, 20), (20, 20)], device)
    q, k, v = qkv(40, device, 3)
    v[3] = 1e4
    v[30, 0, 0] = float("nan")
    ours.plan(step)
    out = ours.forward(0, q, k, v)
    stored = ours.cache[0][1].float().flatten(0, 1)[step.slot_mapping]
    assert float(stored[3].abs().max()) == 448.0 and bool(stored[30, 0, 0].isnan())
    assert bool(out[:20].isfinite().all())


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(UserError, match="allowed are auto, fa2, fa3"):
        make(torch.device("cuda"), prefill="fa1")
