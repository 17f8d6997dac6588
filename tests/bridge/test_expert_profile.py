"""A profile of hot experts: what is written is what the next start begins with; any other file is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import UserError
from engine.experts.capabilities import ExpertCounters, ExpertPlaces
from engine.experts.hybrid.backend import HybridExperts
from engine.experts.hybrid.profile import Profile
from engine.experts.native import NativeExperts
from engine.experts.streamed.backend import StreamedExperts
from native import available
from testing.bridge import HostBridge
from tests.native.expert_layers import F32, E, H, I, K, Layer, config

native: Any = pytest.importorskip("native._native") if available()[0] else pytest.skip(available()[1])
CONFIG = config(hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K, num_hidden_layers=2)
CPU, EXPERT_VALUES = torch.device("cpu"), 3 * H * I * 4
SIZES = {"max_rows": 8, "max_slots": 2, "max_rank": 16}


def hybrid(profile: Path | None, expert_slots: int) -> HybridExperts:
    bridge = HostBridge(NativeExperts(CONFIG, F32, native.WorkerPool([[0]])), CONFIG, CPU)
    made = HybridExperts(bridge, CONFIG, F32, CPU, budget_bytes=expert_slots * EXPERT_VALUES, profile=profile, **SIZES)
    for layer in (0, 1):
        made.load_layer(layer, Layer("F32").store)
    return made


def test_a_start_begins_with_the_experts_that_were_hot(tmp_path: Path) -> None:
    path = tmp_path / "hot.json"
    first = hybrid(path, 3)
    assert first.mover.resident == 3  # none is known to be hot: as many of each layer
    assert (first.place(0) >= 0).any() and (first.place(1) >= 0).any()
    uses = torch.zeros(2, E)
    uses[0, 2], uses[1, 0], uses[1, 4], uses[1, 1] = 5.0, 9.0, 7.0, 1.0
    first.mover.policy.average.copy_(uses.flatten())
    first.close()
    again = hybrid(path, 3)
    assert [(place >= 0).nonzero().flatten().tolist() for place in (again.place(0), again.place(1))] == [[2], [0, 4]]
    expert_slot = again._expert_slots[int(again.place(1)[4])].view(F32)
    wanted = Layer("F32").store.expert("down", 4).dequantise(F32).flatten()
    assert torch.equal(expert_slot[2 * H * I :], wanted)
    places = again.capability(ExpertPlaces)
    assert places is not None and places.num_bytes() == {"CPU": 2 * E * EXPERT_VALUES, "GPU": 3 * EXPERT_VALUES}
    again.close()
    assert json.loads(path.read_text())["layers"]["1"][4] == 7.0 and not list(tmp_path.glob("*.partial"))


def test_hits_are_counted_and_told_by_whoever_wraps(tmp_path: Path) -> None:
    path = tmp_path / "hot.json"
    Profile(path, [0, 1], E).close(torch.arange(2.0 * E))
    streamed = StreamedExperts(made := hybrid(path, 2), CONFIG, F32, CPU, threshold=4, **SIZES)
    made._tables.uses[1, -1], made._tables.uses[0, 0] = 30, 10
    for _ in range(9):
        made.begin_step(1, lora=False, eager=False)
    places, counters = streamed.capability(ExpertPlaces), streamed.capability(ExpertCounters)
    assert places is not None and places.choices is not None and places.choices() == (40, 30)
    assert counters is not None and set(counters.choices()) == {0, 1}
    streamed.close()


@pytest.mark.parametrize(
    "content",
    [
        "no JSON",
        "[]",
        json.dumps({"version": 2}),
        json.dumps({"version": 1, "experts": 3, "layers": {"0": [0, 0, 1], "1": [0, 0, 0]}}),
        json.dumps({"version": 1, "experts": 2, "layers": {"0": [0, 1]}}),
        json.dumps({"version": 1, "experts": 2, "layers": {"0": [0, 1], "1": [0]}}),
        json.dumps({"version": 1, "experts": 2, "layers": {"0": [0, 1], "1": [0, -1]}}),
        json.dumps({"version": 1, "experts": 2, "layers": {"0": [0, 1], "1": ["a", "b"]}}),
    ],
)
def test_a_file_that_is_no_profile_of_the_model_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "hot.json"
    path.write_text(content)
    with pytest.raises(UserError, match="name another file, or delete it") as caught:
        Profile(path, [0, 1], 2).read()
    assert caught.value.field == "expert_profile"


def test_a_folder_that_is_not_there_is_said_at_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="folder does not exist"):
        Profile(tmp_path / "none" / "hot.json", [0], 2)
    assert Profile(tmp_path / "hot.json", [0], 2).read() is None


def test_a_streamed_layer_takes_hot_experts_from_where_they_are() -> None:
    """Whatever is hot, each expert is in the slot that its place says; hot ones are not read from host memory."""
    streamed = StreamedExperts(made := hybrid(None, 3), CONFIG, F32, CPU, threshold=4, **SIZES)
    marked = int(made.place(1).max())
    made._expert_slots.view(F32)[marked] = 7.0  # nowhere else
    streamed.begin_step(8, lora=False, eager=True)
    streamed.prefetch()
    for layer in (0, 1):
        expert_slots = streamed._streaming.layers.take(layer).view(F32)
        place = streamed._streaming._buffers[streamed._streaming.layers.number(layer)].place
        assert place.shape == (SIZES["max_slots"] + 1, E) and (place == place[0]).all()
        assert sorted(place[0].tolist()) == list(range(E))
        for expert in range(E):
            store = Layer("F32").store
            wanted = [store.expert(name, expert).dequantise(F32).flatten() for name in ("gate", "up", "down")]
            moved = int(made.place(layer)[expert]) == marked
            seen = expert_slots[int(place[0, expert])]
            assert torch.equal(seen, torch.full_like(seen, 7.0) if moved else torch.cat(wanted))
        streamed._streaming.layers.release(layer)
    streamed.close()
