"""What the tables point to is what it should be, whatever moves and whichever adapters come and go."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.experts.capabilities import PackedWeights, needed
from engine.experts.gpu.adapters import HostAdapters
from engine.experts.gpu.layout import Sizes
from engine.experts.gpu.source import PackedSource
from engine.experts.hybrid.mover import INTERVAL, Mover, Tables
from engine.experts.native import NativeExperts
from native import _native
from testing.models.shapes import config
from tests.gpu.expert_slots import expert_slots_of
from tests.native.expert_layers import BF16, E, Layer, lora

H, I = 64, 64  # noqa: E741
SIZES = Sizes(E, 3, H, I)
CONFIG = config(hidden_size=H, moe_intermediate_size=I, num_experts=E, num_hidden_layers=3, mlp_only_layers=(1,))
LAYERS = CONFIG.sparse_layers
CPU = torch.device("cpu")
SLOTS = 3
ADAPTERS = [
    None,
    {0: lora(4, 1, hidden=H, inner=I)},
    {0: lora(20, 2, hidden=H, inner=I), 2: lora(9, 3, hidden=H, inner=I)},
]
ADAPTERS[1][0].gate_b[2:5] = ADAPTERS[1][0].up_b[2:5] = ADAPTERS[1][0].down_b[2:5] = 0  # type: ignore[index]


def native() -> tuple[NativeExperts, dict[int, torch.Tensor]]:
    experts = NativeExperts(CONFIG, BF16, _native.WorkerPool([[0], [0]]))  # two shards
    values = {}
    for layer, kind in zip(LAYERS, ("BF16", "Q8_0"), strict=True):
        made = Layer(kind, hidden=H, inner=I)
        experts.load_layer(layer, made.store)
        values[layer] = expert_slots_of(made.store, SIZES, BF16)[1]
    return experts, values


NATIVE, VALUES = native()


def at(address: int, count: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * (2 * count)).from_address(address), dtype=torch.uint8).view(BF16)


def check(mover: Mover, tables: Tables, adapters: HostAdapters, expert_slots: torch.Tensor) -> None:
    loaded = {slot: adapters.get(slot) for slot in range(1, SLOTS + 1)}
    used = 0
    for number, layer in enumerate(LAYERS):
        for expert in range(E):
            base = int(tables.place[number, 0, expert])
            used += base >= 0
            if base >= 0:
                assert torch.equal(expert_slots[base][: VALUES[layer].shape[1]], VALUES[layer][expert])
            for slot in range(1, SLOTS + 1):
                place, address = int(tables.place[number, slot, expert]), int(tables.address[number, slot, expert])
                assert place in (-1, base)
                adapter = loaded.get(slot)
                needs = adapter is not None and layer in adapter.present and bool(adapter.present[layer][expert])
                assert (address == 0) or needs
                if place >= 0:
                    assert (address != 0) == needs
                    if adapter is not None and needs:
                        block = adapter.blocks[layer][expert]
                        assert torch.equal(at(address, block.numel()), block)
                elif base >= 0:
                    assert needs  # the CPU computes it only because its LoRA is not here yet
    assert used == mover.resident <= mover.memory.expert_slots


@settings(max_examples=12)
@given(expert_slots=st.integers(1, 20), seed=st.integers(0, 99), data=st.data())
def test_tables_point_to_the_right_values(expert_slots: int, seed: int, data: st.DataObject) -> None:
    device_slots = torch.zeros(expert_slots, SIZES.expert_values * 2, dtype=torch.uint8)
    tables = Tables.allocate(len(LAYERS), SLOTS + 1, E, CPU)
    source = PackedSource(needed(NATIVE, PackedWeights), SIZES, CPU)
    for layer in LAYERS:
        source.add(layer)
    adapters = HostAdapters(SIZES, BF16, max_slots=SLOTS, max_rank=32, pin=False)
    mover = Mover(SIZES, LAYERS, device_slots, tables, source, adapters, BF16)
    g = torch.Generator().manual_seed(seed)
    for step in range(8 * INTERVAL):
        if step % 5 == 0:
            adapters.put(data.draw(st.integers(1, SLOTS)), ADAPTERS[data.draw(st.integers(0, 2))])
        if step % 20 == 0:
            heat: Any = torch.rand(len(LAYERS), E, generator=g) ** 4 * 20
        tables.uses.add_(heat.int())
        mover.step()
        check(mover, tables, adapters, device_slots)


def test_everything_is_here_in_the_end() -> None:
    device_slots = torch.zeros(40, SIZES.expert_values * 2, dtype=torch.uint8)
    tables = Tables.allocate(len(LAYERS), SLOTS + 1, E, CPU)
    source = PackedSource(needed(NATIVE, PackedWeights), SIZES, CPU)
    for layer in LAYERS:
        source.add(layer)
    adapters = HostAdapters(SIZES, BF16, max_slots=SLOTS, max_rank=32, pin=False)
    mover = Mover(SIZES, LAYERS, device_slots, tables, source, adapters, BF16)
    adapters.put(2, ADAPTERS[2])
    for _ in range(200):
        mover.step()
    assert (tables.place >= 0).all()
    check(mover, tables, adapters, device_slots)
    adapters.put(2, ADAPTERS[1])
    mover.step()
    check(mover, tables, adapters, device_slots)
    assert int((tables.place[:, 2] < 0).sum()) == 5  # of layer 0's experts, three have no LoRA
