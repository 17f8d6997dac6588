"""A streamed step copies the adapters that its rows have, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.experts.base import ExpertBuffers
from engine.experts.native import NativeExperts
from engine.experts.streamed.backend import StreamedExperts
from engine.experts.streamed.layers import LayerStream
from native import _native
from testing.bridge import HostBridge
from testing.models.shapes import config
from tests.native.expert_layers import F32, E, H, I, K, Layer, lora

LAYERS = 2
CONFIG = config(hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K, num_hidden_layers=LAYERS)


def loaded() -> StreamedExperts:
    cpu = torch.device("cpu")
    pool: Any = _native.WorkerPool([[0, 1]])
    bridge = HostBridge(NativeExperts(CONFIG, F32, pool), CONFIG, cpu)
    streamed = StreamedExperts(bridge, CONFIG, F32, cpu, max_rows=8, max_slots=4, max_rank=16, threshold=4)
    for layer in range(LAYERS):
        streamed.load_layer(layer, Layer("F32").store)
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
