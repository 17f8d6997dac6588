"""Which experts are hot: bounds that always hold, and how fast the choice follows a change of the routing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.experts.hybrid.memory import ExpertSlots
from engine.experts.hybrid.mover import INTERVAL, SWAP_STEPS
from engine.experts.hybrid.policy import HotPolicy


@settings(max_examples=60)
@given(experts=st.integers(1, 40), seed=st.integers(0, 999), data=st.data())
def test_bounds(experts: int, seed: int, data: st.DataObject) -> None:
    policy = HotPolicy(experts, decay=0.8)
    g = torch.Generator().manual_seed(seed)
    for _ in range(12):
        policy.observe(torch.randint(0, 5, (experts,), generator=g).float())
        capacity = data.draw(st.integers(0, experts))
        most = data.draw(st.integers(0, 5))
        before = policy.resident.clone()
        moves = policy.moves(capacity, most)
        assert len(moves.admit) <= most
        assert int(policy.resident.sum()) <= capacity
        assert not before[moves.admit].any() and before[moves.evict].all()
        assert len(set(moves.admit)) == len(moves.admit) and len(set(moves.evict)) == len(moves.evict)
        after = before.clone()
        after[moves.evict] = False
        after[moves.admit] = True
        assert torch.equal(after, policy.resident)


def test_near_ties_do_not_travel() -> None:
    policy = HotPolicy(4, decay=0.5)
    policy.observe(torch.tensor([10.0, 9.0, 8.9, 1.0]))
    assert policy.moves(2, 4).admit == [0, 1]
    policy.observe(torch.tensor([10.0, 9.0, 9.9, 1.0]))
    assert policy.moves(2, 4).admit == []
    policy.average[2] = 30
    moves = policy.moves(2, 4)
    assert (moves.admit, moves.evict) == ([2], [1])
    assert policy.moves(1, 0).evict == [0]
    assert policy.drop(5) == [2]


def zipf(layers: int, experts: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    weights = torch.stack([(torch.randperm(experts, generator=g) + 1.0) ** -1.1 for _ in range(layers)])
    return weights / weights.sum(1, keepdim=True)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("rows", [4, 32])
def test_after_a_swap_the_hit_rate_is_back_within_200_steps(share: float, rows: int) -> None:
    layers, experts, k = 6, 64, 4
    capacity = int(layers * experts * share)
    most = -(-capacity * INTERVAL // SWAP_STEPS)
    policy = HotPolicy(layers * experts)
    g = torch.Generator().manual_seed(3)

    def run(routing: torch.Tensor, steps: int) -> float:
        """Hit rate over the last 20 of `steps` steps."""
        hits = total = 0.0
        for step in range(steps):
            ids = torch.stack([torch.multinomial(p.expand(rows, -1), k, generator=g) for p in routing])
            uses = torch.zeros(layers, experts).scatter_add_(1, ids.flatten(1), torch.ones(layers, rows * k))
            if step >= steps - 20:
                hits += float(uses.flatten()[policy.resident].sum())
                total += float(uses.sum())
            policy.observe(uses.flatten())
            if step % INTERVAL == 0:
                policy.moves(capacity, most)
        return hits / total

    def oracle(routing: torch.Tensor) -> float:
        """Hit rate of the truly hottest, whose share of the uses is estimated by drawing."""
        ids = torch.stack([torch.multinomial(p.expand(4000, -1), k, generator=g) for p in routing])
        uses = torch.zeros(layers, experts).scatter_add_(1, ids.flatten(1), torch.ones(layers, 4000 * k))
        return float(uses.flatten().topk(capacity).values.sum() / uses.sum())

    first, second = zipf(layers, experts, 1), zipf(layers, experts, 2)
    assert run(first, 300) >= 0.9 * oracle(first)
    assert run(second, 5) < 0.8 * oracle(second)  # the swap is felt
    assert run(second, 195) >= 0.9 * oracle(second)


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_evenly_spread_routing_moves_next_to_nothing(rows: int) -> None:
    """What is hotter by chance stays where it is: each move reads an expert's weights once more."""
    layers, experts, k = 8, 128, 8
    capacity, most = layers * experts // 2, 16
    policy = HotPolicy(layers * experts)
    policy.average += 1e-6  # as the mover begins
    g = torch.Generator().manual_seed(5)
    moved = []
    for step in range(400):
        ids = torch.rand(layers, rows, experts, generator=g).topk(k).indices
        uses = torch.zeros(layers, experts).scatter_add_(1, ids.flatten(1), torch.ones(layers, rows * k))
        policy.observe(uses.flatten())
        if step % INTERVAL == 0:
            moved.append(len(policy.moves(capacity, most).admit))
    assert int(policy.resident.sum()) == capacity
    assert sum(moved[50:]) <= 10


def test_expert_slots_hold_experts_or_one_slots_lora() -> None:
    memory = ExpertSlots(3, 100)
    memory.open_slot(1, 40)
    first = memory.take()
    places = [memory.take_lora(1) for _ in range(2)]
    assert {place // 100 for place in places} == {1} and {place % 100 for place in places} == {0, 40}
    assert memory.can_take_lora(1) and memory.num_free == 1 and memory.lora_expert_slots == 1
    memory.give_lora(1, places[0])
    assert memory.take_lora(1) == places[0]
    assert memory.take() == 2
    assert not memory.can_take_lora(1)
    with pytest.raises(EngineError, match="no free expert slot"):
        memory.take_lora(1)
    memory.close_slot(1)
    assert memory.num_free == 1 and memory.lora_expert_slots == 0
    memory.give(first)
    assert memory.num_free == 2
    memory.open_slot(2, 101)
    assert not memory.can_take_lora(2)


def test_settings_are_checked() -> None:
    with pytest.raises(EngineError, match="decay 1"):
        HotPolicy(3, decay=1)
