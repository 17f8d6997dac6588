"""float32 gives exactly transformers' greedy tokens, whatever shape the model and the batch have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testing.harness import Harness, full_logits, greedy
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import FAMILIES, save_hf, tiny_model
from tests.engine.parity import BACKENDS, CLEAR, SETTINGS, expect_preempted, prompts


@st.composite
def shapes(draw: st.DrawFn) -> dict:
    experts = draw(st.sampled_from([8, 16, 60, 128]))
    kv_heads = draw(st.sampled_from([1, 2]))
    layers = draw(st.integers(1, 3))
    return {
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, 8)),
        "norm_topk_prob": draw(st.booleans()),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw(st.sampled_from([1, 2, 4])),
        "head_dim": draw(st.sampled_from([16, 32, 64])),
        "attention_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "decoder_sparse_step": draw(st.sampled_from([1, 1, 2])),
        "mlp_only_layers": draw(st.sampled_from([[], [], [0]])),
        "moe_intermediate_size": draw(st.sampled_from([32, 48])),
    }


def own_fields(family: str, shape: dict) -> dict:
    """The shape in the words of the family's configuration."""
    shape = dict(shape)
    if family == "qwen2_moe":
        shape["shared_expert_intermediate_size"] = 3 * shape["moe_intermediate_size"]
        shape["qkv_bias"] = shape.pop("attention_bias")
    elif family == "glm4_moe":
        shape |= {"use_qk_norm": not shape["norm_topk_prob"], "n_shared_experts": shape["num_hidden_layers"]}
        shape["first_k_dense_replace"] = shape.pop("decoder_sparse_step") - 1
        groups = {8: (2, 1), 16: (4, 3), 60: (1, 1), 128: (8, 4)}[shape["num_experts"]]
        if shape["num_experts_per_tok"] <= shape["num_experts"] * groups[1] // groups[0]:
            shape["n_group"], shape["topk_group"] = groups
    elif family == "minimax_m2":
        del shape["attention_bias"]
        shape["rotary_dim"] = shape["head_dim"] if shape["tie_word_embeddings"] else shape["head_dim"] // 4 * 2
    elif family.startswith("deepseek"):
        dense = len(shape["mlp_only_layers"])
        for name in ("head_dim", "decoder_sparse_step", "mlp_only_layers"):
            del shape[name]
        shape |= {"first_k_dense_replace": dense, "n_group": 1, "topk_group": 1}
    return shape


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=shapes(), seed=st.integers(0, 1000), budget=st.sampled_from([8, 32, 256]), overlap=st.booleans())
def test_greedy_tokens_equal_transformers(tmp_path_factory, family, shape, seed, budget, overlap):
    """On every backend."""
    model = tiny_model(seed, family=family, **own_fields(family, shape))
    folder = tmp_path_factory.mktemp("model")
    save_hf(model, folder)
    asked, runs = prompts(seed, [3, 17, 40]), []
    for backend in SETTINGS:
        engine = Harness(folder, max_num_batched_tokens=budget, max_num_seqs=8, overlap=overlap, **backend)
        runs.append(engine.generate(asked, max_tokens=6))
        engine.close()
    wanted = [greedy(model, prompt, 6, tokens) for prompt, tokens in zip(asked, runs[0], strict=True)]
    for backend, got in zip(SETTINGS, runs, strict=True):
        for tokens, (expected, gap) in zip(got, wanted, strict=True):
            assert tokens == expected or gap < CLEAR, backend


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> tuple[torch.nn.Module, Path]:
    model = tiny_model(7, num_hidden_layers=3, num_experts=16, num_experts_per_tok=4)
    folder = tmp_path_factory.mktemp("model")
    save_hf(model, folder)
    return model, folder


@BACKENDS
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [8, 64])
def test_preempted_and_recomputed(model_folder, backend, overlap, budget):
    """A cache far too small for all at once: requests are preempted, recomputed, and none changes."""
    model, folder = model_folder
    expect_preempted(model, folder, max_num_batched_tokens=budget, overlap=overlap, **backend)


@BACKENDS
@pytest.mark.parametrize("overlap", [False, True])
def test_greedy_tokens_whoever_shares_the_step(model_folder, backend, overlap):
    """A step of greedy rows alone takes the greedy tokens at once; any other row makes all wait for logits."""
    model, folder = model_folder
    asked = prompts(9, [4, 30, 11])
    engine = Harness(folder, overlap=overlap, max_num_batched_tokens=16, max_num_seqs=8, **backend)
    alone = engine.generate(asked, max_tokens=12)
    rids = [engine.submit(prompt, max_tokens=12) for prompt in asked]
    engine.submit(asked[0], max_tokens=5, temperature=1.0, seed=1)
    engine.submit(asked[1], max_tokens=3, logprobs=2)
    results = engine.run()
    assert [results[rid].tokens for rid in rids] == alone
    for prompt, tokens in zip(asked, alone, strict=True):
        expected, gap = greedy(model, prompt, 12, tokens)
        assert tokens == expected or gap < CLEAR
    engine.close()


@BACKENDS
def test_prefix_hits_do_not_change_tokens(model_folder, backend):
    model, folder = model_folder
    start = prompts(5, [64])[0]
    asked = [start + tail for tail in prompts(6, [1, 9, 33])] + [start, start]
    engine = Harness(folder, **backend)
    first = engine.generate(asked[:1])
    rest = engine.generate(asked[1:])
    assert sum(engine.results[f"r{i}"].end.cached_tokens for i in range(1, 5)) >= 4 * 48
    for prompt, tokens in zip(asked, first + rest, strict=True):
        assert tokens == greedy(model, prompt, 8)[0]
    engine.close()


@pytest.mark.parametrize(
    "expert_type,dense_type",
    [
        ("F32", "F32"),
        ("F16", "BF16"),
        ("BF16", "F16"),
        ("Q8_0", "Q8_0"),
        ("Q4_0", "Q4_1"),
        ("Q5_0", "Q5_1"),
        ("Q4_K", "Q6_K"),
        ("Q5_K", "Q4_K"),
    ],
)
def test_gguf_types(tmp_path, expert_type, dense_type):
    """The engine computes with exactly the values that the file holds."""
    model = tiny_model(11, hidden_size=256, moe_intermediate_size=256, num_experts=8, head_dim=64)
    held = save_gguf(model, tmp_path / "m.gguf", expert_type=expert_type, dense_type=dense_type)
    engine = Harness(tmp_path / "m.gguf")
    asked = prompts(1, [5, 21])
    for prompt, tokens in zip(asked, engine.generate(asked), strict=True):
        expected, gap = greedy(held, prompt, 8, tokens)
        assert tokens == expected or gap < CLEAR
    engine.close()


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "yarn",
            "factor": 2.5,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.3,
            "beta_fast": 16,
        },
        {"rope_type": "dynamic", "factor": 2.0},
    ],
)
def test_rope_scaling(tmp_path, scaling):
    model = tiny_model(2, max_position_embeddings=512, rope_parameters={"rope_theta": 10000.0, **scaling})
    save_hf(model, tmp_path)
    prompt = prompts(4, [100])[0]
    engine = Harness(tmp_path)
    assert engine.generate([prompt]) == [greedy(model, prompt, 8)[0]]
    engine.close()


def test_prompt_and_token_logprobs(model_folder):
    model, folder = model_folder
    prompt = prompts(9, [30])[0]
    engine = Harness(folder, max_num_batched_tokens=8, max_num_seqs=2)
    rid = engine.submit(prompt, prompt_logprobs=2, logprobs=3, max_tokens=4)
    engine.run()
    result = engine.results[rid]
    expected = torch.log_softmax(full_logits(model, prompt + result.tokens), -1)
    assert result.prompt_logprobs[0] is None and len(result.prompt_logprobs) == len(prompt)
    for position in range(1, len(prompt)):
        at = result.prompt_logprobs[position]
        assert at.chosen.token == prompt[position]
        assert at.chosen.logprob == pytest.approx(float(expected[position - 1, prompt[position]]), abs=1e-3)
        assert [t.token for t in at.top] == expected[position - 1].topk(2).indices.tolist()
    for i, at in enumerate(result.logprobs):
        assert at.chosen.logprob == pytest.approx(float(expected[len(prompt) - 1 + i].max()), abs=1e-3)
        assert at.chosen.rank == 1 and len(at.top) == 3
    engine.close()
