"""Experts in tiles on the GPU: every format, in matrix instructions and row by row, against the file's values in
float64; layers that mix formats; adapters."""

from __future__ import annotations

import pytest
import torch

from engine.experts.gpu import compute, few_rows, products, widened
from engine.experts.gpu.compute import GpuCompute
from engine.experts.gpu.layout import Sizes
from engine.weights.tiled.layout import has_tiles
from native import _native
from tests.gpu.test_experts_kernels import tables
from tests.native.blocks import QUANTISED
from tests.native.expert_layers import BF16, F32, E, H, I, K, Layer, batch, distinct, error, expected, lora, put

SIZES = Sizes(E, K, H, I)
GPU = torch.cuda.is_available()
DTYPE = BF16 if GPU else F32  # the interpreter has no bf16
OUTS = (BF16, F32) if GPU else (F32,)  # of results: beside a CPU's they are float32
BOUND = 0.012 if GPU else 3e-6  # weights, and scales before them, are rounded to bf16
INTEGER_BOUND = 0.025  # rows in int8, as the CPU's
FORMATS = [kind for kind in QUANTISED if has_tiles(_native.format_of(kind))]
CODED = ("IQ4_XS", "MXFP4", "F8_E4M3")
MIXED = [("Q4_K", "Q5_0", "Q6_K"), ("Q8_0", "BF16", "Q4_0"), CODED]
LAYERS = [*((kind, kind, kind) for kind in FORMATS), *MIXED]
SOME = LAYERS if GPU else [*MIXED, ("Q6_K", "Q6_K", "IQ4_NL")]  # the interpreter is slow
HOPPER = GPU and torch.version.cuda is not None and torch.cuda.get_device_capability() >= few_rows.HOPPER
CHOICES = [(kinds, False) for kinds in (LAYERS if GPU else SOME) if not {"BF16", "F8_E4M3"} & {*kinds}]
CHOICE_BATCHES: list[tuple[int, list[int] | None]] = [(2, None), (0, [1]), (2, [5, 1])]
CHOICE_BATCHES += [(0, None), (1, None), (2, [0, 5]), (1, [5])] if GPU else []  # the interpreter is slow
CHOICES += [(kinds, True) for kinds in LAYERS if "BF16" not in kinds and HOPPER]  # by kernels in CUDA C++


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 20, 120, 300] if GPU else [2, 9])
@pytest.mark.parametrize("kinds", SOME, ids=lambda kinds: "-".join(dict.fromkeys(kinds)))
def test_right_with_and_without_adapters(
    kinds: tuple[str, str, str], rows: int, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 rows: one after another; 9 and 20 in blocks of 16; more in larger ones."""
    for name in ("VECTOR_ROWS", "BYTE_VECTOR_ROWS"):
        monkeypatch.setattr(products, name, 2 if rows == 2 else 0)
    monkeypatch.setattr(products, "CHOICE_ROWS", 0)
    monkeypatch.setattr(products, "CUDA_CHOICE_ROWS", 0)
    _check(Layer(*kinds), rows, kernel_device, INTEGER_BOUND if GPU and rows == 2 else BOUND)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [20, 300] if GPU else [9])
@pytest.mark.parametrize("kinds", [kinds for kinds in SOME if "BF16" not in kinds], ids="-".join)
def test_long_chunks_of_weights_made_plain(
    kinds: tuple[str, str, str], rows: int, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three experts at a time, of down more."""
    monkeypatch.setattr(products, "CHOICE_ROWS", 0)
    monkeypatch.setattr(products, "CUDA_CHOICE_ROWS", 0)
    monkeypatch.setattr(widened, "ROWS", 0)
    monkeypatch.setattr(widened, "SCRATCH_BYTES", 3 * 2 * H * I * DTYPE.itemsize)
    assert widened.at_a_time(SIZES, 2, DTYPE.itemsize) < E
    monkeypatch.setattr(compute, "tiled_products", None)
    _check(Layer(*kinds), rows, kernel_device, BOUND)


def _check(layer: Layer, rows: int, kernel_device: torch.device, bound: float) -> None:
    """With and without adapters, which are not all of one rank, and with two rows behind the batch."""
    adapters = {1: lora(4, 11, DTYPE), 2: lora(16, 12, DTYPE), 5: lora(20, 13, DTYPE)}
    adapters[2].gate_b[3] = adapters[2].up_b[3] = adapters[2].down_b[3] = 0
    here = list(range(E)) if rows > 2 else [1, 2, 5, 7]
    experts = GpuCompute(SIZES, DTYPE, kernel_device, max_rows=rows + 2, max_rank=20, max_slots=7)
    table, slots, _keep = tables(layer, adapters, DTYPE, here, kernel_device)
    for slot_list in (None, [0, 1, 2, 5]):
        b, want = batch(rows, DTYPE, slots=slot_list), batch(rows, DTYPE, slots=slot_list)
        want.ids[:rows][~torch.isin(want.ids[:rows], torch.tensor(here))] = -1
        b.ids[rows:] = 0
        for name in ("bsz", "ids", "weights", "slots", "hidden", "out"):
            setattr(b, name, getattr(b, name).to(kernel_device))
        for out in map(b.out.to, OUTS):
            experts.run(b, table, slots, 0, out, lora=slot_list is not None)
            assert error(out[:rows].cpu(), expected(layer, want, adapters)) < bound
            assert (out[rows:] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kinds, hopper", CHOICES, ids=lambda value: str(value) if value in (True, False) else "-".join(value)
)
def test_single_choices(
    kinds: tuple[str, str, str], hopper: bool, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in int8, each choice by itself: choices of no expert, and those that another backend computes; with adapters
    of several ranks, of which one has nothing for an expert."""
    monkeypatch.setattr(few_rows, "HOPPER", few_rows.HOPPER if hopper else (99, 0))
    monkeypatch.setattr(products, "INTEGERS", (DTYPE,))
    monkeypatch.setattr(products, "CHOICE_ROWS", 4)
    monkeypatch.setattr(products, "CUDA_CHOICE_ROWS", 4)
    layer, here = Layer(*kinds), [1, 2, 5, 7]
    adapters = {1: lora(4, 11, DTYPE), 5: lora(20, 13, DTYPE)}
    adapters[5].gate_b[2] = adapters[5].up_b[2] = adapters[5].down_b[2] = 0
    experts = GpuCompute(SIZES, DTYPE, kernel_device, max_rows=4, max_rank=20, max_slots=7)
    table, slots, _keep = tables(layer, adapters, DTYPE, here, kernel_device)
    for rows, slot_list in CHOICE_BATCHES:
        b, want = (batch(rows, DTYPE, seed=rows, slots=slot_list) for _ in range(2))
        want.ids[:rows][~torch.isin(want.ids[:rows], torch.tensor(here))] = -1
        if rows == 2:
            want.ids[1, 0] = b.ids[1, 0] = -1
        for name in ("bsz", "ids", "weights", "slots", "hidden", "out"):
            setattr(b, name, getattr(b, name).to(kernel_device))
        for out in map(b.out.to, OUTS):
            experts.run(b, table, slots, 0, out, lora=slot_list is not None)
            assert experts.weight_passes() == int((want.ids[:rows] >= 0).sum())
            assert table.touched is not None and int(table.touched) == distinct(want)
            table.touched.zero_()
            if rows:
                assert error(out[:rows].cpu(), expected(layer, want, adapters)) < INTEGER_BOUND
            assert (out[rows:] == 7).all()


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="a CUDA graph needs a GPU")
@pytest.mark.parametrize("kinds", [("Q4_K", "Q4_K", "Q6_K"), CODED], ids="-".join)
def test_a_graph_serves_fewer_rows_and_other_adapters(kinds: tuple[str, str, str]) -> None:
    device = torch.device("cuda")
    layer, adapters = Layer(*kinds), {1: lora(4, 11), 2: lora(16, 12)}
    experts = GpuCompute(SIZES, BF16, device, max_rows=18, max_rank=20, max_slots=7)
    table, slots, _keep = tables(layer, adapters, BF16, list(range(E)), device)
    b = batch(16, BF16, slots=[0, 1, 2])
    for name in ("bsz", "ids", "weights", "slots", "hidden", "out"):
        setattr(b, name, getattr(b, name).to(device))
    b.ids[16:] = 0
    experts.run(b, table, slots, 0, b.out, lora=True)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts.run(b, table, slots, 0, b.out, lora=True)
    for rows, order in ((16, [2, 0]), (5, [1, 2, 0]), (1, [0])):
        want = batch(rows, BF16, seed=rows, slots=order)
        put(b, want)
        graph.replay()
        assert error(b.out[:rows].cpu(), expected(layer, want, adapters)) < INTEGER_BOUND
        assert (b.out[rows:] == 7).all()
