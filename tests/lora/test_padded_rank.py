"""One padding of ranks for projections and experts."""

from __future__ import annotations

import pytest

import engine.experts.gpu.compute
import engine.experts.gpu.layout
import engine.linear.gpu
from engine.lora.adapter import RANK_STEP, padded_rank


@pytest.mark.parametrize("rank", range(1, 257))
def test_it_holds_the_rank_and_suits_both_kernels(rank: int) -> None:
    padded = padded_rank(rank)
    assert rank <= padded < 2 * rank or padded == RANK_STEP >= rank
    assert padded & (padded - 1) == 0, "tl.arange of the projections' kernel wants a power of two"
    assert padded % RANK_STEP == 0, "the experts' kernel goes through it in such steps"


def test_there_is_one() -> None:
    users = (engine.experts.gpu.compute, engine.experts.gpu.layout, engine.linear.gpu)
    assert {module.padded_rank for module in users} == {padded_rank}
