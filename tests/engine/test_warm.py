"""What a GPU runs before the server listens leaves nothing behind."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.build.warm import run_prompt
from tests.engine.test_lora_serving import Family
from tests.engine.test_parity import BACKENDS, prompts


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Family:
    return Family(tmp_path_factory.mktemp("family"))


@BACKENDS
def test_prompts_without_a_valid_token_change_nothing(family, backend):
    engine = family.engine(cuda_graphs="padded", max_num_batched_tokens=64, max_num_seqs=6, **backend)
    runner, blocks = engine.core.runner, engine.core.scheduler.config.num_blocks
    names, asked = [None, "adapter-0", "adapter-2"], prompts(1, [3, 9, 20])
    engine.generate(asked, names)

    @settings(max_examples=5)
    @given(st.integers(1, 64), st.integers(0, 3))
    def runs(tokens: int, slot: int) -> None:
        planes = [plane[:, :blocks].copy() for a in runner.model.attention_backends for plane in a.kv_planes()]
        run_prompt(runner, tokens, slot, blocks)
        after = [plane[:, :blocks] for a in runner.model.attention_backends for plane in a.kv_planes()]
        assert all((x == y).all() for x, y in zip(planes, after, strict=True))
        assert [int(b.bsz[0]) for b in runner.model.expert_buffers] == [0]

    runs()
    for name, prompt, tokens in zip(names, asked, engine.generate(asked, names), strict=True):
        family.expect(name, prompt, tokens)
    engine.close()
