"""A streamed step copies the adapters that its rows have and no others, a trial one layer of each kind of formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.experts.base import ExpertBuffers
from engine.experts.native import NativeExperts
from engine.experts.streamed.backend import StreamedExperts
from engine.experts.streamed.layers import LayerStream
from native import _native
from testing.bridge import HostBridge
from testing.models.shapes import config
from tests.native.expert_layers import F32, E, H, I, K, Layer, lora

LAYERS = 2


def loaded(types: Sequence[str] = ("F32",) * LAYERS) -> StreamedExperts:
    sizes = {"hidden_size": H, "moe_intermediate_size": I, "num_experts": E, "num_experts_per_tok": K}
    model = config(**sizes, num_hidden_layers=len(types))
    cpu = torch.device("cpu")
    pool: Any = _native.WorkerPool([[0, 1]])
    bridge = HostBridge(NativeExperts(model, F32, pool), model, cpu)
    streamed = StreamedExperts(bridge, model, F32, cpu, max_rows=8, max_slots=4, max_rank=16, threshold=4)
    for layer, type in enumerate(types):
        streamed.load_layer(layer, Layer(type).store)
    return streamed


def test_the_first_copies_wait_for_the_tables_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer's first copy waits for is recorded behind the zeros of the tables that it fills."""
    streamed = loaded()
    there: list[int] = []
    prepare = LayerStream.prepare

    def prepared(self: LayerStream) -> None:
        there.append(len(streamed._streaming._buffers))
        prepare(self)

    monkeypatch.setattr(LayerStream, "prepare", prepared)
    streamed.begin_step(8, lora=False, eager=True)
    assert there and set(there) == {2}
    streamed.close()


@pytest.mark.parametrize(("slots", "copied"), [({3}, {3}), (set(), set()), (None, {1, 3}), ({1, 2}, {1})], ids=str)
def test_only_the_slots_of_the_step(slots: set[int] | None, copied: set[int]) -> None:
    streamed = loaded()
    for slot in (1, 3):
        streamed.set_adapter(slot, dict.fromkeys(range(LAYERS), lora(4, slot, F32)))
    streamed.bind(0, ExpertBuffers.allocate(8, K, H, F32))
    for rows, eager in ((3, True), (8, False)):  # not streamed: nothing is copied
        streamed.begin_step(rows, lora=True, eager=eager, slots=slots)
        streamed.prefetch()
        assert not streamed._streaming._buffers
    streamed.begin_step(8, lora=slots != set(), eager=True, slots=slots)
    assert not streamed._streaming._buffers[0].lora  # the step's inputs come first
    streamed.prefetch()
    (first, other) = streamed._streaming._buffers
    assert set(first.lora) == copied and not other.lora
    assert {int(slot) for slot in first.address.any(1).nonzero().flatten()} == copied
    streamed.begin_step(8, lora=True, eager=True, slots={1})  # what slot 3 left behind is no longer pointed to
    streamed.prefetch()
    assert {int(slot) for slot in streamed._streaming._buffers[0].address.any(1).nonzero().flatten()} == {1}
    streamed.close()


@settings(max_examples=10, deadline=None)
@given(st.lists(st.sampled_from(["F32", "Q8_0", "Q4_0"]), min_size=1, max_size=6))
def test_after_a_trial_every_layer_is_brought(types: list[str]) -> None:
    streamed = loaded(types)
    layers, brought = streamed._streaming.layers, list[int]()
    copy = layers._copy

    def counted(buffer: Any) -> None:
        brought.append(buffer.layer)
        copy(buffer)

    layers._copy = counted  # type: ignore[method-assign]

    def step() -> list[torch.Tensor]:
        brought.clear()
        streamed.begin_step(8, lora=False, eager=True)
        streamed.prefetch()
        there = []
        for layer in range(len(types)):
            there.append(layers.take(layer).clone())
            layers.release(layer)
        return there

    first = step()
    with streamed.trial():
        step()
    assert brought == sorted(types.index(type) for type in set(types))
    again = step()
    assert brought == list(range(len(types)))
    for layer, (expected, found) in enumerate(zip(first, again, strict=True)):
        used = layers.layout(layer).num_bytes
        assert expected[:, :used].equal(found[:, :used])
    streamed.close()
