"""What an engine shows of itself while it runs."""

from __future__ import annotations

import pytest

from engine.messages import GetLive, GetStats, Live, Reply
from testing.harness import Harness
from testing.models.tiny import save_hf, tiny_model
from tests.engine.parity import prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_hf(tiny_model(5), path)
    return path


def look(engine: Harness) -> Live:
    engine.core.handle(GetLive(call_id=9))
    reply = engine.messages[-1]
    assert isinstance(reply, Reply) and reply.ok and reply.call_id == 9 and reply.live is not None
    return reply.live


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_are_the_running_requests(folder, overlap):
    engine = Harness(folder, overlap=overlap)
    assert look(engine).rows == []
    asked = {engine.submit(p, max_tokens=20, tenant=f"t{i}"): p for i, p in enumerate(prompts(1, [4, 40]))}
    engine.until(lambda: all(engine.results[rid].tokens for rid in asked))
    seen = look(engine)
    assert {row.request_id: row.prompt_tokens for row in seen.rows} == {rid: len(p) for rid, p in asked.items()}
    for row in seen.rows:
        assert row.adapter is None and row.max_tokens == 20
        assert row.output_tokens == len(engine.results[row.request_id].tokens)
        assert row.prompt_tokens <= row.computed_tokens <= row.blocks * seen.block_tokens
    assert seen.blocks_used == sum(row.blocks for row in seen.rows)
    assert set(seen.tenant_service) == {"t0", "t1"}
    engine.run()
    after = look(engine)
    assert after.rows == [] and after.blocks_used == 0
    assert after.decode_tokens > seen.decode_tokens and after.time_s >= seen.time_s
    engine.close()


def test_native_experts_count_each_choice_of_each_token(folder):
    engine = Harness(folder, rules="cpu", overlap=False, measure_bandwidth=True)
    engine.generate(prompts(3, [5, 17]), max_tokens=6)
    seen, config = look(engine), engine.core.runner.model.config
    tokens = seen.prefill_tokens + seen.decode_tokens
    assert set(seen.expert_choices) == set(config.sparse_layers)
    for layer, counts in seen.expert_choices.items():
        last = layer == config.num_hidden_layers - 1  # it computes only the tokens after which something is sampled
        assert len(counts) == config.num_experts
        assert sum(counts) == (2 * 6 if last else tokens) * config.num_experts_per_tok
    assert seen.weight_bytes_read is not None and seen.weight_bytes_read > 0
    assert seen.read_bandwidth is not None and seen.read_bandwidth > 0
    stats = engine.core.stats()
    assert stats["experts_touched"] == seen.experts_touched and stats["expert_layers"] == seen.expert_layers
    assert seen.expert_layers == stats["steps"] * len(config.sparse_layers)
    assert config.num_experts_per_tok <= seen.experts_touched / seen.expert_layers <= config.num_experts
    assert stats["expert_read_bytes"] == seen.weight_bytes_read
    assert stats["memory_read_bandwidth"] == seen.read_bandwidth
    assert any("memory is read at" in note for note in engine.core.runner.notes)
    engine.close()


def test_experts_that_do_not_count_say_nothing(folder):
    engine = Harness(folder, rules="reference")
    engine.generate(prompts(3, [5]))
    seen = look(engine)
    assert seen.weight_bytes_read is None and seen.expert_choices == {}
    engine.core.handle(GetStats(call_id=1))
    assert engine.messages[-1].live is None
    engine.close()
