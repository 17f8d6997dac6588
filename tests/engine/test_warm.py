"""What a GPU runs before the server listens leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import EngineError, ExpertBackendError
from engine.experts.gpu.compute import CHUNK_ROWS, WIDE_ROWS, chunk_lengths
from engine.experts.gpu.layout import Sizes
from engine.experts.gpu.products import tiles_for
from engine.experts.gpu.widened import Widened
from engine.launch import warm
from engine.launch.warm import run_prompts, timed_steps
from engine.steps.runner import ModelRunner
from testing.models.mtp import TorchMtp, add_mtp
from tests.engine.family import Family
from tests.engine.parity import BACKENDS, prompts


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Family:
    family = Family(tmp_path_factory.mktemp("family"), family="glm4_moe", mlp_only_layers=[0])
    add_mtp(TorchMtp(family.base), family.model_path)
    return family


@BACKENDS
def test_prompts_without_a_valid_token_change_nothing(family, backend):
    engine = family.engine(
        cuda_graphs="padded", max_num_batched_tokens=64, max_num_seqs=6, speculate="mtp:2", **backend
    )
    runner, blocks = engine.core.runner, engine.core.scheduler.config.num_blocks
    names, asked = [None, "adapter-0", "adapter-2"], prompts(1, [3, 9, 20])
    engine.generate(asked, names)

    @settings(max_examples=8)
    @given(st.lists(st.integers(1, 10), min_size=1, max_size=6), st.integers(0, 3))
    def runs(lengths: list[int], slot: int) -> None:
        planes = [plane[:, :blocks].copy() for a in runner.model.attention_backends for plane in a.host_planes()]
        run_prompts(runner, lengths, slot, blocks)
        after = [plane[:, :blocks] for a in runner.model.attention_backends for plane in a.host_planes()]
        assert all((x == y).all() for x, y in zip(planes, after, strict=True))
        assert [int(b.bsz[0]) for b in runner.model.expert_buffers] == [0]

    runs()
    for name, prompt, tokens in zip(names, asked, engine.generate(asked, names), strict=True):
        family.expect(name, prompt, tokens)
    engine.close()


@BACKENDS
@pytest.mark.parametrize("graphs", ["off", "padded"])
def test_timed_steps_leave_nothing_but_their_times(family, backend, graphs):
    engine = family.engine(cuda_graphs=graphs, max_num_batched_tokens=300, max_num_seqs=9, **backend)
    scheduler, runner = engine.core.scheduler, engine.core.runner
    blocks = scheduler.config.num_blocks
    planes = [plane[:, :blocks].copy() for a in runner.model.attention_backends for plane in a.host_planes()]
    found = list(timed_steps(runner, 300, 9, blocks))
    shapes = [(plan.num_tokens, len(plan.rows), plan.num_decodes) for plan, _, _ in found]
    assert shapes == [(64, 1, 0), (128, 2, 0), (256, 4, 0), (1, 1, 1), (8, 8, 8)]
    assert all(seconds > 0 and (experts or 0) > 0 for _, seconds, experts in found)
    after = [plane[:, :blocks] for a in runner.model.attention_backends for plane in a.host_planes()]
    assert all((x == y).all() for x, y in zip(planes, after, strict=True))
    names, asked = [None, "adapter-0", "adapter-2"], prompts(1, [3, 9, 20])
    for name, prompt, tokens in zip(names, asked, engine.generate(asked, names), strict=True):
        family.expect(name, prompt, tokens)
    engine.close()


@settings(deadline=None)
@given(st.integers(1, 9).map(lambda n: 1 << n), st.integers(1, 10))
def test_chunks_of_every_way_are_tried(experts: int, top_k: int) -> None:
    sizes = Sizes(experts, min(top_k, experts), 128, 128)

    def way(rows: int) -> tuple[int, bool, bool]:
        return tiles_for(sizes, rows, torch.bfloat16).bm, Widened.pays(sizes, rows), rows <= WIDE_ROWS

    tried = [warm.SHORT[-1], *chunk_lengths(sizes.experts, sizes.top_k)]
    assert {way(rows) for rows in range(warm.SHORT[-1], CHUNK_ROWS + 1)} == {way(rows) for rows in tried}


def test_what_fails_in_a_prompt_is_said_with_it(monkeypatch):
    """On a GPU; here what would run there is not."""
    ran: list[tuple[int, int]] = []
    fails: list[tuple[int, int]] = []

    def run(runner: ModelRunner, lengths: Sequence[int], slot: int, scratch_block: int) -> None:
        ran.append((sum(lengths), slot))
        at_once = min(ran[-1][0] // 64, 12) if ran[-1][0] in warm.TOGETHER else 1
        assert len(lengths) == at_once and max(lengths) - min(lengths) <= 1
        if ran[-1] in fails:
            raise ExpertBackendError("no room")

    def prompts_of(tokens: int, slots: int, chunks: bool) -> list[tuple[int, int]]:
        ran.clear()
        plan: Any = SimpleNamespace(token_budget=tokens, max_model_len=8192, num_blocks=4, placement=None)
        plan.config = EngineConfig(max_adapter_slots=slots, max_num_seqs=12)
        plan.source = SimpleNamespace(config=SimpleNamespace(num_experts=128, num_experts_per_tok=8))
        monkeypatch.setattr(warm, "computes_chunks", lambda placement: chunks)
        runner: Any = SimpleNamespace(device=torch.device("cuda"))
        warm.warm_up(runner, plan, lambda *_: None)
        return list(ran)

    monkeypatch.setattr(warm, "run_prompts", run)
    lengths = sorted({5, 48, 257, 1537, 4097, 5120, *warm.TOGETHER})
    assert prompts_of(8192, 0, True) == [(n, 0) for n in lengths]
    assert prompts_of(47, 2, True) == [(5, 0), (5, 1)]
    assert prompts_of(512, 1, False) == [(n, slot) for n in (5, 48, 64, 128, 256, 512) for slot in (0, 1)]
    for failing, said in (((257, 1), "a prompt of 257 tokens with an adapter"), ((512, 0), "8 prompts of 64 tokens")):
        fails[:] = [failing]
        with pytest.raises(EngineError, match=f"{said}, tried before the server listens: ExpertBackendError: no room"):
            prompts_of(512, 1, True)
