"""Sampling against slow, obvious definitions."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import PendingLogprobs, SampleRow, _draw, is_greedy, sample
from scheduler.request import SamplingParams


def row(position: int = 0, seed: int = 0, prompt: list[int] | None = None, output: list[int] | None = None, **params):
    return SampleRow(SamplingParams(**params), seed, position, Counter(prompt or []), Counter(output or []))


def filtered(logits: torch.Tensor, p: SamplingParams) -> set[int]:
    """The tokens that may be drawn, by definition."""
    probs = torch.softmax(logits.double() / p.temperature, -1)
    order = sorted(range(len(probs)), key=lambda t: -probs[t])
    kept = order[: p.top_k] if p.top_k else order
    kept = [t for t in kept if probs[t] >= p.min_p * probs[order[0]]]
    total, nucleus, mass = sum(probs[t] for t in kept), [], 0.0
    for token in kept:
        if mass / total >= p.top_p:
            break
        nucleus.append(token)
        mass += float(probs[token])
    return set(nucleus)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1 << 30),
    vocabulary=st.sampled_from([5, 40, 3000]),
    temperature=st.floats(0.2, 3),
    top_p=st.floats(0.05, 1),
    top_k=st.integers(0, 50),
    min_p=st.floats(0, 0.5),
)
def test_only_tokens_that_pass_the_filters_are_drawn(seed, vocabulary, temperature, top_p, top_k, min_p):
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
    params = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    allowed = filtered(logits[0], SamplingParams(**params))
    rows = [row(position=i, seed=seed, **params) for i in range(50)]
    drawn = _draw(logits.expand(50, -1).clone(), rows)
    near = filtered(
        logits[0], SamplingParams(**{**params, "top_p": min(1.0, top_p + 1e-5), "min_p": max(0.0, min_p - 1e-6)})
    )
    assert set(drawn.tolist()) <= allowed | near


def test_frequencies_follow_the_probabilities():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    n = 20_000
    drawn = _draw(logits.expand(n, -1).clone(), [row(position=i, temperature=1.0) for i in range(n)])
    observed = torch.bincount(drawn, minlength=4) / n
    assert torch.allclose(observed, torch.softmax(logits[0], -1), atol=0.015)


def test_a_draw_does_not_depend_on_its_neighbours():
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(1))
    rows = [row(position=7 * i, seed=i, temperature=0.5 + i / 4, top_p=0.5 + i / 12, top_k=10 * i) for i in range(6)]
    together = sample(logits.clone(), rows)[0].tolist()
    alone = [int(sample(logits[i : i + 1].clone(), [rows[i]])[0]) for i in range(6)]
    assert together == alone


def test_seeds_and_positions_change_the_draw():
    logits = torch.zeros(1, 1000)
    by_seed = {int(_draw(logits.clone(), [row(seed=s, temperature=1.0)])[0]) for s in range(50)}
    by_position = {int(_draw(logits.clone(), [row(position=p, temperature=1.0)])[0]) for p in range(50)}
    assert len(by_seed) > 40 and len(by_position) > 40


def test_greedy_is_argmax_and_temperature_zero_ignores_filters():
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    tokens, _ = sample(logits.clone(), [row(temperature=0.0, top_k=3, top_p=0.1)] * 3)
    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_penalties_and_bias():
    logits = torch.tensor([[1.0, -1.0, 2.0, 0.5]])
    r = row(
        prompt=[1],
        output=[0, 0, 2],
        temperature=0.0,
        repetition_penalty=2.0,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        logit_bias={3: 1.5},
    )
    _, out = sample(logits.clone(), [r])
    assert out[0].tolist() == pytest.approx([1.0 / 2 - 0.25 - 1.0, -2.0, 2.0 / 2 - 0.25 - 0.5, 2.0])


def test_logprobs_rank_and_order():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [0.0, 0.0, 5.0, 0.0]])
    first, second = PendingLogprobs(logits, torch.tensor([2, 2]), [2, None]).read()
    assert second is None and first is not None
    expected = torch.log_softmax(logits[0], -1)
    assert first.chosen.token == 2 and first.chosen.rank == 3
    assert first.chosen.logprob == pytest.approx(float(expected[2]))
    assert [(t.token, t.rank) for t in first.top] == [(1, 1), (3, 2)]


def test_what_is_wanted_beside_the_likeliest_token():
    assert is_greedy(SamplingParams(temperature=0.0, top_p=0.5, top_k=3, seed=1, max_tokens=2, stop_token_ids=(1,)))
    more = ({"temperature": 0.1}, {"logprobs": 0}, {"logit_bias": {1: 1.0}}, {"repetition_penalty": 1.1})
    for changed in (*more, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}):
        assert not is_greedy(SamplingParams(**({"temperature": 0.0} | changed)))
