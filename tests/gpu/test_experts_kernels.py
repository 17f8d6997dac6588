"""The GPU's expert kernels against float64, with experts elsewhere, padding rows and many adapters."""

from __future__ import annotations

import os

import pytest
import torch

from engine.experts.gpu import compute as module
from engine.experts.gpu import products
from engine.experts.gpu.compute import GpuCompute, LayerTables, SlotTables
from engine.experts.gpu.layout import Elementwise, Sizes, lora_blocks
from engine.lora.adapter import ExpertLora
from testing.compiled import ASKED
from tests.gpu.expert_slots import expert_slots_of
from tests.native.expert_layers import BF16, F32, E, H, I, K, Layer, batch, distinct, error, expected, lora

SIZES = Sizes(E, K, H, I)
# the interpreter has no bf16
DTYPES = [F32, BF16] if torch.cuda.is_available() or ASKED in os.environ else [F32]
MANY = [(500, range(E))] if torch.cuda.is_available() else []  # the interpreter is slow


def tables(
    layer: Layer,
    adapters: dict[int, ExpertLora],
    dtype: torch.dtype,
    here: list[int],
    device: torch.device,
    sizes: Sizes = SIZES,
) -> tuple[LayerTables, SlotTables, list[torch.Tensor]]:
    expert_slot, every = expert_slots_of(layer.store, sizes, dtype)
    expert_slots = every[here].to(device)
    place = torch.full((8, E), -1, dtype=torch.int32)
    place[:, here] = torch.arange(len(here), dtype=torch.int32)
    slots = SlotTables.allocate(1, 8, device)
    address = torch.zeros(8, E, dtype=torch.int64)
    keep = []
    for slot, adapter in adapters.items():
        blocks, present = lora_blocks(adapter, sizes, dtype)
        keep.append(blocks.to(device))
        step = blocks.shape[1] * blocks.element_size()
        address[slot] = (keep[-1].data_ptr() + torch.arange(E) * step) * present
        slots.ranks[slot] = -(-adapter.rank // 16) * 16
        slots.scales[0, slot] = torch.tensor([adapter.gate_scale, adapter.up_scale, adapter.down_scale])
    touched = torch.zeros((), dtype=torch.int64, device=device)
    elementwise = Elementwise.of(layer.store, sizes, device)
    table = LayerTables(expert_slots, place.to(device), address.to(device), expert_slot, touched, elementwise)
    return table, slots, keep


@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_weights_are_read_once_per_expert_whatever_the_number_of_adapters(
    count: int, kernel_device: torch.device
) -> None:
    layer = Layer("BF16")
    adapters = {slot: lora(4, 11 + slot, F32) for slot in range(1, count + 1)}
    compute = GpuCompute(SIZES, F32, kernel_device, max_rows=18, max_rank=4, max_slots=7)
    table, slots, _keep = tables(layer, adapters, F32, list(range(E)), kernel_device)
    b = batch(16, F32, slots=list(range(count + 1)))
    b.ids[16:] = 0
    wanted = distinct(b)
    for name in ("bsz", "ids", "weights", "slots", "hidden", "out"):
        setattr(b, name, getattr(b, name).to(kernel_device))
    compute.run(b, table, slots, 0, b.out, lora=count > 0)
    assert compute.weight_passes() == wanted  # an expert's rows fit one block
    assert table.touched is not None and int(table.touched) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slot_list", [None, [0, 1, 2, 5]], ids=["base", "adapters"])
@pytest.mark.parametrize("beside", [0, 99], ids=["within", "beside"])
@pytest.mark.parametrize(
    "rows,here", [(1, range(E)), (1, [1, 2, 5, 7]), (9, range(E)), (14, [1, 2, 5, 7]), (90, range(E)), *MANY]
)
def test_right_with_and_without_adapters(
    rows: int,
    here: list[int],
    beside: int,
    slot_list: list[int] | None,
    dtype: torch.dtype,
    kernel_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Adapters within the products, and beside them."""
    monkeypatch.setattr(module, "WIDE_ROWS", 100)
    monkeypatch.setattr(products, "BESIDE_EACH", beside)
    layer = Layer("BF16")
    adapters = {1: lora(4, 11, dtype), 2: lora(16, 12, dtype), 5: lora(20, 13, dtype)}
    adapters[2].gate_b[3] = adapters[2].up_b[3] = adapters[2].down_b[3] = 0
    compute = GpuCompute(SIZES, dtype, kernel_device, max_rows=rows + 2, max_rank=20, max_slots=7)
    table, slots, _keep = tables(layer, adapters, dtype, list(here), kernel_device)
    b = batch(rows, dtype, slots=slot_list)
    b.ids[0, 1] = -1
    want = batch(rows, dtype, slots=slot_list)
    want.ids[0, 1] = -1
    want.ids[:rows][~torch.isin(want.ids[:rows], torch.tensor(list(here)))] = -1
    b.ids[rows:] = 0
    b.rows = rows if slot_list is None else None  # launched for the true rows, or for all that fit
    for name in ("bsz", "ids", "weights", "slots", "hidden", "out"):
        setattr(b, name, getattr(b, name).to(kernel_device))
    for calls in (1, 2):
        compute.run(b, table, slots, 0, b.out, lora=slot_list is not None)
        assert error(b.out[:rows].cpu(), expected(layer, want, adapters)) < (2e-6 if dtype == F32 else 0.008)
        assert (b.out[rows:] == 7).all()
        assert table.touched is not None and int(table.touched) == calls * distinct(want)
