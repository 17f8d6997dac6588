"""Several ranks compute what one does, and end together. On a CPU: over gloo, by the code that GPUs run over NCCL."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from engine.errors import AdapterError
from engine.launch.assemble import pad_decode
from engine.launch.leader import Leader
from engine.lora.adapter import AdapterWeights
from engine.ranks.watch import Limits
from engine.steps.graphs.padded import PaddedDecode
from engine.steps.runner import ModelRunner
from native import available
from testing.harness import Harness, Result, greedy
from testing.models.tiny import save_hf, tiny_model
from tests.engine.family import Family
from tests.engine.parity import CLEAR, prompts
from tests.parallel import forks

SHAPE = {
    "num_hidden_layers": 2, "mlp_only_layers": [1], "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
    "intermediate_size": 128, "moe_intermediate_size": 128, "num_experts": 4, "attention_bias": True, "vocab_size": 130,
}  # fmt: skip
NAMES = [None, "adapter-0", "adapter-1", None]  # adapter-1 brings MLPs of its own


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Family:
    return Family(tmp_path_factory.mktemp("family"), 2, **SHAPE)


def answers(family: Family, adapters: bool = True, **config) -> list[Result]:
    """Chunked prompts beside decode rows: greedy, drawn and with log-probabilities of prompts; then steps of which
    nothing but greedy tokens is wanted."""
    engine = Harness(family.model_path, max_num_batched_tokens=24, max_num_seqs=6, **config)
    for name, path in family.paths.items() if adapters else ():
        engine.adapter(name, path)
    asked = prompts(1, [3, 9, 40, 14], 128)
    names = NAMES if adapters else [None] * 4
    ids = [engine.submit(p, n, logprobs=3) for p, n in zip(asked, names, strict=True)]
    ids.append(engine.submit(asked[1], names[1], temperature=1.0, seed=5, presence_penalty=0.5, prompt_logprobs=2))
    engine.run()
    ids += [engine.submit(p, n) for p, n in zip(asked, [*names[:2], None, names[1]], strict=True)]
    results = engine.run()
    engine.close()
    return [results[i] for i in ids]


def values(results: list[Result]) -> np.ndarray:
    """Every log-probability that was answered."""
    seen = [entry for r in results for entry in [*r.logprobs, *(r.prompt_logprobs or [])] if entry is not None]
    return np.array([p.logprob for entry in seen for p in (entry.chosen, *entry.top)])


@pytest.fixture(scope="module")
def alone(family) -> list[Result]:
    return answers(family)


@pytest.fixture(scope="module", autouse=True)
def quick_starts() -> Iterator[None]:
    """Ranks are forked from a process that has imported torch. Those of test_ends.py are started as the engine does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.launch.leader.start_rank", forks.ForkedRank)
        yield


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        pytest.param(2, {"cuda_graphs": "padded"}, id="2-padded"),
        pytest.param(4, {"expert_parallel": True, "cuda_graphs": "padded"}, id="4-whole-experts"),
        pytest.param(4, {"overlap": True, "cuda_graphs": "padded"}, id="4-padded-overlapped"),
        pytest.param(
            2,
            {"rules": None, "pack_cache": "off", "speculate": "ngram:2:always", "expert_parallel": True},
            id="2-native-drafts-whole-experts",
            marks=pytest.mark.skipif(not available()[0], reason=available()[1]),
        ),
    ],
)
def test_ranks_answer_as_one_does(family, alone, ranks, config):
    got = answers(family, tensor_parallel=ranks, **config)
    assert [r.tokens for r in got] == [r.tokens for r in alone]
    np.testing.assert_allclose(values(got), values(alone), atol=2e-3 if "rules" in config else 1e-4)
    assert len({tuple(r.tokens) for r in got}) > 3


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("qwen2_moe", {"num_attention_heads": 2, "shared_expert_intermediate_size": 64, "tie_word_embeddings": True}),
        ("mixtral", {}),
        ("deepseek_v2", {"q_lora_rank": None}),
    ],
)
def test_other_families_are_divided(tmp_path, family, shape):
    """A shared expert and a tied head; experts that are as wide as a dense layer would be."""
    model = tiny_model(5, family=family, **shape)
    save_hf(model, tmp_path)
    asked = prompts(2, [4, 21])
    engine = Harness(tmp_path, tensor_parallel=2)
    for prompt, tokens in zip(asked, engine.generate(asked), strict=True):
        expected, gap = greedy(model, prompt, len(tokens), tokens)
        assert tokens == expected or gap < CLEAR
    engine.close()


def test_heads_of_latent_attention_are_divided(tmp_path):
    """Each rank keeps all latents, and has its heads' part of their projection and of its adapters."""
    family = Family(tmp_path, 2, family="deepseek_v3", mlp_only_layers=None)
    names, asked = [None, "adapter-0", "adapter-1"], prompts(4, [5, 20, 9])
    engine = family.engine(tensor_parallel=2)
    for name, prompt, tokens in zip(names, asked, engine.generate(asked, names), strict=True):
        family.expect(name, prompt, tokens)
    engine.close()


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"expert_parallel": True},
        pytest.param(
            {"rules": None, "pack_cache": "off"}, marks=pytest.mark.skipif(not available()[0], reason=available()[1])
        ),
    ],
    ids=["torch", "whole-experts", "native"],
)
def test_sinks_and_biases_of_experts_are_divided(tmp_path, config):
    """gpt-oss, within its window and beyond it: a bias that is added to a sum counts once."""
    family = Family(tmp_path, 2, family="gpt_oss", mlp_only_layers=[], sliding_window=8)
    names, asked = [None, "adapter-0", "adapter-1"], prompts(4, [5, 20, 9])
    engine = family.engine(tensor_parallel=2, **config)
    for name, prompt, tokens in zip(names, asked, engine.generate(asked, names), strict=True):
        family.expect(name, prompt, tokens)
    engine.close()


@pytest.mark.parametrize("graphs", ["off", "padded"])
def test_a_norm_over_all_heads_is_one_over_all_ranks(tmp_path, graphs):
    family = Family(tmp_path, 2, family="minimax_m2", mlp_only_layers=None)
    names, asked = [None, "adapter-0", "adapter-1"], prompts(4, [5, 20, 9])
    engine = family.engine(tensor_parallel=2, cuda_graphs=graphs)
    for name, prompt, tokens in zip(names, asked, engine.generate(asked, names), strict=True):
        family.expect(name, prompt, tokens)
    engine.close()


def test_experts_may_stay_whole_on_rank_0(family, alone, monkeypatch):
    """As beside GPUs, where the CPU computes them."""
    monkeypatch.setattr("engine.planning.ranks.divides_experts", lambda placement: False)
    got = answers(family, tensor_parallel=2)
    assert [r.tokens for r in got] == [r.tokens for r in alone]
    np.testing.assert_allclose(values(got), values(alone), atol=1e-4)


def test_bfloat16_differs_by_rounding(family):
    exact, one, two = (
        values(answers(family, adapters=False, **config))[:4]  # of the first tokens: the same prompts
        for config in ({}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "tensor_parallel": 2})
    )
    assert np.abs(two - exact).mean() < 3 * np.abs(one - exact).mean() + 0.02


def test_an_adapter_that_one_rank_cannot_take_fills_no_slot(family, alone):
    engine = Harness(family.model_path, tensor_parallel=2)
    leader = engine.core.runner.leader

    def refuse(slot: int, adapter: AdapterWeights) -> None:
        raise AdapterError("not this one")

    with pytest.raises(AdapterError, match="not this one"):
        leader.set_adapter(refuse, 1, AdapterWeights("a", "made"))
    engine.adapter("adapter-0", family.paths["adapter-0"])  # the others' answers are not mixed up
    assert engine.generate([prompts(1, [3, 9], 128)[1]], ["adapter-0"]) == [alone[1].tokens]
    engine.close()


def test_an_adapter_that_a_rank_does_not_take_ends_all(family, monkeypatch):
    def end(leader: Leader, why: str) -> None:
        raise RuntimeError(why)

    monkeypatch.setattr(Leader, "_end", end)
    engine = Harness(family.model_path, tensor_parallel=2)
    leader = engine.core.runner.leader
    monkeypatch.setattr("engine.launch.leader.LIMITS", Limits(serving_s=2.0))
    monkeypatch.setattr(leader._members[0], "send_adapter", lambda *_: None)
    with pytest.raises(RuntimeError, match="rank 1 of 2 has not taken an adapter for 2 s"):
        leader.set_adapter(lambda *_: None, 1, AdapterWeights("a", "made"))
    engine.close()


def test_a_start_that_fails_drops_graphs_before_the_group(family, monkeypatch):
    """NCCL's end waits for the graphs that it is captured in."""
    padded: list[weakref.ref[PaddedDecode]] = []
    left: list[PaddedDecode | None] = []
    close = Leader.close

    def pad(runner: ModelRunner, *args) -> None:
        pad_decode(runner, *args)
        assert runner.padded is not None
        padded.append(weakref.ref(runner.padded))
        raise RuntimeError("out of memory")

    def closed(leader: Leader) -> None:
        left.append(padded[0]())
        close(leader)

    monkeypatch.setattr(Leader, "close", closed)
    monkeypatch.setattr("engine.launch.assemble.pad_decode", pad)
    with pytest.raises(RuntimeError, match="out of memory"):
        Harness(family.model_path, tensor_parallel=2, cuda_graphs="padded")
    assert left == [None]
