"""The order of a batch's choices and its blocks: the plain form against its definition, the kernel against it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.experts.gpu.index import Index, add_touched, build, most_blocks

CPU = torch.device("cpu")


def batch(rows: int, k: int, experts: int, seed: int, skew: bool = False) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=g)[:k] for _ in range(rows)])
    if skew:
        ids[:, 0] = experts - 1
    ids[torch.rand(rows, k, generator=g) < 0.1] = -1
    slots = torch.randint(0, 4, (rows,), generator=g, dtype=torch.int32)
    place = torch.randperm(experts, generator=g).int().repeat(4, 1)
    place[torch.rand(4, experts, generator=g) < 0.3] = -1
    return ids, slots, place


def check(index: Index, bsz: int, ids: torch.Tensor, slots: torch.Tensor, place: torch.Tensor, block_rows: int) -> None:
    rows, k = ids.shape
    experts = place.shape[1]
    wanted = sorted(
        (e, int(slots[r]), r * k + j)
        for r in range(bsz)
        for j, e in enumerate(ids[r].tolist())
        if e >= 0 and place[int(slots[r]), e] >= 0
    )
    assert index.order[: len(wanted)].tolist() == [choice for _, _, choice in wanted]
    starts = [sum(e < expert for e, _, _ in wanted) for expert in range(experts + 1)]
    assert index.start.tolist() == starts
    blocks = [(e, first) for e in range(experts) for first in range(starts[e], starts[e + 1], block_rows)]
    assert int(index.num_blocks) == len(blocks) <= most_blocks(rows * k, experts, block_rows)
    made = list(zip(index.block_expert.tolist(), index.block_first.tolist(), strict=True))
    assert made[: len(blocks)] == blocks


@settings(max_examples=40)
@given(
    rows=st.integers(1, 20), experts=st.integers(2, 9), step=st.sampled_from([1, 2, 16]), seed=st.integers(0, 99),
    skew=st.booleans(), data=st.data(),
)  # fmt: skip
def test_plain_form(rows: int, experts: int, step: int, seed: int, skew: bool, data: st.DataObject) -> None:
    ids, slots, place = batch(rows, min(3, experts), experts, seed, skew)
    bsz = data.draw(st.integers(0, rows))
    index = Index.allocate(20, ids.shape[1], experts, 1, CPU)  # larger than the batch, as an engine's is
    build(index, torch.tensor([bsz], dtype=torch.int32), ids, slots, place, step)
    check(index, bsz, ids, slots, place, step)


@settings(max_examples=40)
@given(rows=st.integers(0, 20), bsz=st.integers(0, 25), experts=st.integers(2, 9), seed=st.integers(0, 99))
def test_distinct_experts_of_many_choices(rows: int, bsz: int, experts: int, seed: int) -> None:
    """Ids of no expert (-1), or past the experts, are another's to refuse."""
    ids = torch.randint(-1, experts + 2, (rows, 3), generator=torch.Generator().manual_seed(seed))
    touched = torch.tensor(7)
    add_touched(touched, torch.tensor([bsz], dtype=torch.int32), ids, experts)
    assert int(touched) == 7 + len({e for e in ids[:bsz].flatten().tolist() if 0 <= e < experts})


@pytest.mark.gpu
@pytest.mark.parametrize(
    "rows,k,experts,step", [(1, 8, 128, 16), (5, 2, 3, 2), (32, 8, 128, 16), (60, 3, 11, 16), (200, 8, 16, 64)]
)
def test_kernel(rows: int, k: int, experts: int, step: int, kernel_device: torch.device) -> None:
    """In one chunk and in several; `bsz` may say more rows than there are in a part of a batch."""
    from engine.experts.gpu.index_kernel import launch

    for seed, bsz in [(0, rows), (1, rows // 2), (2, 0), (3, rows + 7)]:
        ids, slots, place = batch(rows, k, experts, seed, skew=seed == 1)
        index = Index.allocate(rows + 3, k, experts, 1, kernel_device)
        given = [t.to(kernel_device) for t in (torch.tensor([bsz], dtype=torch.int32), ids, slots, place)]
        touched = torch.tensor(100, device=kernel_device)
        launch(index, *given, step, touched)
        check(index, min(bsz, rows), ids, slots, place, step)
        assert int(touched) == 100 + int((index.start[1:] > index.start[:-1]).sum())
        launch(index, *given, step)
        assert int(touched) == 100 + int((index.start[1:] > index.start[:-1]).sum()), "nobody asked"
