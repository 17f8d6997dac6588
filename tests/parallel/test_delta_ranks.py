"""Ranks of models with gated delta nets answer as one does, from states of their own heads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.delta import DeltaBackend
from engine.errors import UserError
from native import available
from scheduler.drafts import Drafter
from testing.harness import Harness, greedy
from testing.models.gguf_writer import save_gguf
from testing.models.quantised import FP8_CONFIG, save_quantised
from testing.models.tiny import STATEFUL, save_hf, tiny_model
from tests.engine.knowing import Knowing
from tests.engine.parity import CLEAR, prompts
from tests.engine.test_states import ATTENTION, DELTA, EXPERTS, SEPARATE, SHARED, trained
from tests.parallel import forks

SHAPE = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "shared_expert_intermediate_size": 128, "moe_intermediate_size": 128,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quick_starts() -> Iterator[None]:
    """Ranks are forked from a process that has imported torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.launch.leader.start_rank", forks.ForkedRank)
        yield


@pytest.fixture(scope="module", params=STATEFUL)
def model_folder(request, tmp_path_factory) -> tuple[torch.nn.Module, Path]:
    """safetensors, and beside them `m.gguf`, in which Qwen3.5's value heads have another order."""
    model, folder = tiny_model(3, family=request.param, **SHAPE), tmp_path_factory.mktemp("model")
    save_hf(model, folder / "hf")
    save_gguf(model, folder / "m.gguf", "F32", "F32")
    return model, folder


def expect(model: torch.nn.Module, asked: list[list[int]], got: list[list[int]]) -> None:
    for prompt, tokens in zip(asked, got, strict=True):
        expected, gap = greedy(model, prompt, len(tokens), tokens)
        assert tokens == expected or gap < CLEAR


@pytest.mark.parametrize(
    ("ranks", "file", "config"),
    [
        pytest.param(2, "hf", {}, id="2"),
        pytest.param(4, "m.gguf", {"overlap": True}, id="4-gguf"),
        pytest.param(2, "m.gguf", {"expert_parallel": True}, id="2-gguf-whole-experts"),
        pytest.param(
            2,
            "m.gguf",
            {"rules": None, "pack_cache": "off"},
            id="2-gguf-native",
            marks=pytest.mark.skipif(not available()[0], reason=available()[1]),
        ),
    ],
)
def test_tokens_are_those_of_one(model_folder, ranks, file, config):
    """Prompts in parts beside decode rows, then from snapshots."""
    model, folder = model_folder
    engine = Harness(folder / file, tensor_parallel=ranks, max_num_batched_tokens=24, max_num_seqs=4, **config)
    asked = prompts(5, [3, 40, 70, 36])
    got = engine.generate(asked, max_tokens=18)
    asked += [[*prompt, *tokens, *prompt[:5]] for prompt, tokens in zip(asked, got, strict=True)]
    got += engine.generate(asked[4:], max_tokens=4)
    assert engine.results["r6"].end.cached_tokens >= 64, "no snapshot was used"
    engine.close()
    expect(model, asked, got)


def test_preempted_and_recomputed(model_folder):
    model, folder = model_folder
    engine = Harness(
        folder / "hf", tensor_parallel=2, kv_cache_tokens=96, max_model_len=80, max_num_batched_tokens=8,
        max_num_seqs=4,
    )  # fmt: skip
    asked = prompts(3, [30] * 4)
    got = engine.generate(asked, max_tokens=20)
    assert engine.core.scheduler.stats()["preemptions"] > 0
    engine.close()
    expect(model, asked, got)


def test_drafts_that_were_wrong_leave_no_rank_s_state_changed(model_folder):
    model, folder = model_folder
    engine = Harness(folder / "hf", tensor_parallel=2, max_num_seqs=4, speculate="ngram:3:always")
    asked = prompts(4, [25, 40])
    texts = [[*prompt, *greedy(model, prompt, 24)[0]] for prompt in asked]
    engine.core.scheduler._core.drafter = Drafter(Knowing(texts, 2), 3, always=True)
    got = engine.generate(asked, max_tokens=24)
    stats = engine.core.stats()
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
    engine.close()
    expect(model, asked, got)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
@pytest.mark.parametrize("file", ["hf", "m.gguf"])
def test_adapters(model_folder, tmp_path, file):
    """Of all projections, in the order of the file's heads, beside the base."""
    base, folder = model_folder
    delta = DELTA if base.config.model_type == "qwen3_next" else SEPARATE
    targets: dict[str, dict[str, Any]] = {
        "delta": {"target_modules": delta},
        "all": {"target_modules": [*delta, *ATTENTION, *SHARED], "target_parameters": EXPERTS},
    }
    models = {None: base} | {name: trained(base, tmp_path / name, 5, **each) for name, each in targets.items()}
    engine = Harness(folder / file, tensor_parallel=2, max_num_batched_tokens=16, max_num_seqs=4)
    for name in targets:
        engine.adapter(name, tmp_path / name)
    asked = prompts(8, [20, 9, 30])
    got = engine.generate(asked, list(models), max_tokens=10)
    engine.close()
    for model, prompt, tokens in zip(models.values(), asked, got, strict=True):
        expect(model, [prompt], [tokens])
    assert greedy(models["all"], asked[2], 10)[0] != greedy(base, asked[2], 10)[0]


def test_blocks_and_snapshots_take_each_others_memory(tmp_path):
    """On all ranks, which give back the same pages."""
    model = tiny_model(3, family="qwen3_next", **SHAPE)
    save_hf(model, tmp_path)
    engine = Harness(tmp_path, tensor_parallel=2, kv_cache_tokens=2048, max_model_len=512, max_num_seqs=2)
    told = []
    leader = engine.runner.leader
    assert leader is not None
    announce = leader.announce
    leader.announce = lambda step: (told.append(step.idle), announce(step))  # type: ignore[method-assign]
    prompt = prompts(0, [130])[0]
    for seed in range(6):
        got = engine.generate([prompt, *prompts(seed, [400, 150])], max_tokens=20)
        expect(model, [prompt], got[:1])
    assert any(idle.slots for idle in told if idle) and any(idle.blocks for idle in told if idle)
    engine.close()


def test_a_rank_s_states_are_planned_for(model_folder):
    """Half of what one has, for as many requests."""
    one, two = (Harness(model_folder[1] / "hf", tensor_parallel=ranks) for ranks in (1, 2))
    whole, part = (engine.plan.source.config for engine in (one, two))
    assert part.state_bytes * 2 == whole.state_bytes and part.kept_bytes * 2 == whole.kept_bytes
    assert two.plan.memory.num_states == one.plan.memory.num_states
    held = [
        sum(plane.nbytes for each in engine.runner.model.attention_backends if isinstance(each, DeltaBackend)
            for plane in each.host_planes()) / engine.plan.memory.state_slots
        for engine in (one, two)
    ]  # fmt: skip
    assert held[0] == 2 * held[1] == whole.state_bytes
    one.close()
    two.close()


def test_quantised_files_are_divided_along_their_blocks(tmp_path):
    """FP8 by 128 x 128; GGUF's types, with value heads dealt out by turns."""
    wide: dict[str, Any] = SHAPE | {"hidden_size": 128, "linear_value_head_dim": 64, "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 256,
            "moe_intermediate_size": 256}  # fmt: skip
    held, _ = save_quantised(tiny_model(4, family="qwen3_next", **wide), tmp_path / "fp8", FP8_CONFIG)
    tiled = tiny_model(4, family="qwen3_5_moe_text", **wide)
    of_gguf = save_gguf(tiled, tmp_path / "m.gguf", "Q8_0", "Q8_0")
    for model, path in ((held, tmp_path / "fp8"), (of_gguf, tmp_path / "m.gguf")):
        engine, asked = Harness(path, tensor_parallel=2), prompts(4, [5, 40])
        got = engine.generate(asked, max_tokens=8)
        engine.close()
        expect(model, asked, got)


def test_blocks_of_value_heads_are_not_cut(tmp_path):
    """256 values of out_proj's inputs are 8 heads of 32; a rank has 2 of each turn's 4."""
    model = tiny_model(4, family="qwen3_5_moe_text", **SHAPE, hidden_size=256)
    save_gguf(model, tmp_path / "m.gguf", "F32", "F32", types={"blk.0.ssm_out.weight": "Q4_K"})
    with pytest.raises(UserError, match=r"out_proj.* is Q4_K, blocks of 256 values along its 256 inputs, .* in 2 runs"):
        Harness(tmp_path / "m.gguf", tensor_parallel=2)


def test_ranks_that_do_not_divide_key_heads_are_refused(tmp_path):
    save_hf(tiny_model(3, family="qwen3_next", **(SHAPE | {"linear_num_key_heads": 2})), tmp_path)
    with pytest.raises(UserError, match=r"4: linear_num_key_heads is 2; allowed for this model are 1, 2$") as caught:
        Harness(tmp_path, tensor_parallel=4)
    assert caught.value.field == "tensor_parallel"


def test_log_probabilities_are_those_of_one(model_folder):
    """Of a prompt's tokens, too, whose hidden states are all kept."""
    seen = []
    for ranks in (1, 2):
        engine = Harness(model_folder[1] / "hf", tensor_parallel=ranks, max_num_batched_tokens=24, max_num_seqs=4)
        rid = engine.submit(prompts(2, [50])[0], logprobs=3, prompt_logprobs=2)
        result = engine.run()[rid]
        engine.close()
        entries = [entry for entry in [*result.logprobs, *(result.prompt_logprobs or [])] if entry is not None]
        seen.append(np.array([p.logprob for entry in entries for p in (entry.chosen, *entry.top)]))
    np.testing.assert_allclose(*seen, atol=1e-4)
