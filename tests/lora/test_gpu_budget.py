"""What adapters take in the slots of a GPU's experts, and which loads are refused for it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import UserError
from engine.experts.gpu.layout import Sizes, lora_blocks
from engine.lora.adapter import AdapterWeights
from engine.lora.budget import AdapterBudget, AdapterSize
from tests.native.expert_layers import E, H, I, K, lora


@pytest.mark.parametrize("ranks", [(4, 4), (4, 20), (16,), ()])
def test_stated_bytes_are_those_of_the_blocks(ranks: tuple[int, ...]) -> None:
    """All layers have the blocks of the largest rank."""
    layers = {layer: lora(rank, layer) for layer, rank in enumerate(ranks)}
    made = [lora_blocks(layer, Sizes(E, K, H, I), torch.bfloat16, max(ranks))[0] for layer in layers.values()]
    assert AdapterWeights("a", "peft", experts=layers).gpu_bytes(2) == sum(t.numel() * 2 for t in made)


@given(
    sizes=st.lists(st.integers(0, 50), max_size=12),
    slots=st.integers(1, 4),
    limit=st.integers(0, 120),
    share=st.sampled_from([1.0, 0.5]),
)
def test_what_is_admitted_fits_whatever_is_in_slots(sizes: list[int], slots: int, limit: int, share: float) -> None:
    budget = AdapterBudget(None, slots, gpu_bytes=limit, gpu_share=share)
    known: list[AdapterSize] = []
    for number, size in enumerate(sizes):
        new = AdapterSize(1, 1, size)
        worst = share * sum(sorted([size, *(other.gpu for other in known)])[-slots:])
        try:
            budget.check(f"a{number}", [], known, new, pinned=False)
        except UserError as error:
            assert f"'a{number}'" in str(error) and int(worst) > limit
            continue
        known.append(new)
        assert int(worst) <= limit
    AdapterBudget(None, slots).check("any", [], known, AdapterSize(1, 1, 1 << 50), pinned=True)
