"""Drafts by a model's layer of multi-token prediction on a GPU: what the layer says, the tokens of a run without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testing.harness import Harness
from testing.models.mtp import TorchMtp, add_mtp
from testing.models.tiny import save_hf, tiny_model
from tests.engine.parity import prompts
from tests.engine.test_mtp import NAMES, always_right, expect, made, watched
from tests.gpu.test_latent import SHAPE as LATENT
from tests.gpu.test_serving import TIE

pytestmark = pytest.mark.gpu
# Every expert of every token: a random router's choice would flip between bf16 and float32, and tokens with it.
EVERY = {"num_experts": 4, "num_experts_per_tok": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 64, "hidden_size": 128, **EVERY},
    "deepseek_v3": LATENT | {"n_group": 1, "topk_group": 1} | EVERY,
    "qwen3_5_moe_text": {"head_dim": 256, "hidden_size": 128, "shared_expert_intermediate_size": 64, **EVERY},
}
GPU: dict[str, Any] = {"device": "cuda", "rules": None, "dtype": "bfloat16", "max_num_seqs": 4}
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {"expert_backend": "native"},
    "launches": {"expert_backend": "native", "cuda_graphs": "off"},
    "experts there": {"expert_backend": "gpu"},
}


@pytest.mark.parametrize("name", NAMES)
def test_in_float32_each_proposal_is_what_the_layer_says(tmp_path: Path, name: str) -> None:
    layer = made(name, tmp_path)
    engine = Harness(tmp_path, device="cuda", speculate="mtp:3:always", max_num_seqs=4, max_num_batched_tokens=24)
    seen, asked = watched(engine), prompts(1, [3, 40, 30, 20])
    first = engine.generate(asked, max_tokens=20)
    assert engine.generate(asked, max_tokens=20) == first
    engine.close()
    assert len(seen) > 40
    expect(layer, seen)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SHAPES)
def test_in_bfloat16_proposals_are_the_layers_but_for_ties(tmp_path: Path, name: str, way: str) -> None:
    """Behind prompts in chunks, decode steps as graphs and launched, behind wrong drafts."""
    model = tiny_model(3, family=name, **SHAPES[name]).bfloat16().float()
    layer = TorchMtp(model, 5).bfloat16().float()
    save_hf(model, tmp_path)
    add_mtp(layer, tmp_path)
    engine = Harness(tmp_path, speculate="mtp:1:always", max_num_batched_tokens=24, **GPU, **WAYS[way])
    seen = watched(engine)
    engine.generate(prompts(1, [3, 40, 30, 20]), max_tokens=12)
    engine.close()
    others = []
    for text, tokens in seen:
        expected, gap = layer.propose(text, 1)
        others += [(len(text), tokens, expected, gap)] if tokens != expected and gap >= TIE else []
    assert len(seen) > 20 and not others, others


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SHAPES)
def test_drafts_that_are_always_right_are_accepted(tmp_path: Path, name: str, way: str) -> None:
    """Up to rounding: the model's last norm and the layer's see the same values, rounded once more."""
    always_right(tmp_path, name, **SHAPES[name])
    runs = []
    for speculate in (None, "mtp:4:always"):
        engine = Harness(tmp_path, speculate=speculate, **GPU, **WAYS[way])
        runs.append((engine.generate([[3, 4, 5], [7, 9]], max_tokens=40), engine.core.stats()))
        engine.close()
    (plain, _), (drafted, stats) = runs
    assert plain == drafted
    assert stats["accepted_tokens"] >= 0.9 * stats["drafted_tokens"] > 40
