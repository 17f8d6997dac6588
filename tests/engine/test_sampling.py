"""Sampling against slow, obvious definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import UserError
from engine.grammar.masks import allowed_words, masks_of
from engine.ops.greedy import NOT_FINITE
from engine.steps.limits import check_sampling
from engine.steps.sampling import PendingLogprobs, SampleRow, _draw, forbid, sample
from scheduler.request import SamplingParams


def row(position: int = 0, seed: int = 0, prompt: list[int] | None = None, output: list[int] | None = None, **params):
    seen = np.array(sorted({*(prompt or []), *(output or [])}), np.int64)
    if not {"repetition_penalty", "presence_penalty", "frequency_penalty"} & params.keys():
        seen = seen[:0]
    counts = np.array([(output or []).count(token) for token in seen], np.int64)
    return SampleRow(SamplingParams(**params), seed, position, seen, counts)


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
    together = sample(logits.clone(), rows).tokens.tolist()
    alone = [int(sample(logits[i : i + 1].clone(), [rows[i]]).tokens) for i in range(6)]
    assert together == alone


def test_seeds_and_positions_change_the_draw():
    logits = torch.zeros(1, 1000)
    by_seed = {int(_draw(logits.clone(), [row(seed=s, temperature=1.0)])[0]) for s in range(50)}
    by_position = {int(_draw(logits.clone(), [row(position=p, temperature=1.0)])[0]) for p in range(50)}
    assert len(by_seed) > 40 and len(by_position) > 40


def test_greedy_is_argmax_and_temperature_zero_ignores_filters():
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    tokens = sample(logits.clone(), [row(temperature=0.0, top_k=3, top_p=0.1)] * 3).tokens
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
    out = sample(logits.clone(), [r]).logits
    assert out[0].tolist() == pytest.approx([1.0 / 2 - 0.25 - 1.0, -2.0, 2.0 / 2 - 0.25 - 0.5, 2.0])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), count=st.integers(1, 5))
def test_rows_are_penalised_together_as_each_alone(data, count):
    """By the definitions, token by token."""
    tokens, size = st.lists(st.integers(0, 6), max_size=9), st.floats(-2, 2)
    logits = torch.randn(count, 7, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    rows, wanted = [], logits.double()
    for i in range(count):
        prompt, output = data.draw(tokens), data.draw(tokens)
        bias = data.draw(st.dictionaries(st.integers(0, 6), size, max_size=3))
        p = {"repetition_penalty": data.draw(st.floats(0.5, 2)), "presence_penalty": data.draw(size)}
        p |= {"frequency_penalty": data.draw(size), "logit_bias": bias}
        rows.append(row(prompt=prompt, output=output, temperature=0.0, **p))
        for token in range(7):
            value = float(wanted[i, token]) + bias.get(token, 0.0)
            if token in prompt + output:
                value = value / p["repetition_penalty"] if value > 0 else value * p["repetition_penalty"]
            if token in output:
                value -= p["presence_penalty"] + p["frequency_penalty"] * output.count(token)
            wanted[i, token] = value
    assert torch.allclose(sample(logits, rows).logits.double(), wanted, atol=1e-4)


def test_logprobs_rank_and_order():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [0.0, 0.0, 5.0, 0.0]])
    first, second = PendingLogprobs(logits, torch.tensor([2, 2]), [2, None]).read()
    assert second is None and first is not None
    expected = torch.log_softmax(logits[0], -1)
    assert first.chosen.token == 2 and first.chosen.rank == 3
    assert first.chosen.logprob == pytest.approx(float(expected[2]))
    assert [(t.token, t.rank) for t in first.top] == [(1, 1), (3, 2)]


def test_what_is_wanted_beside_the_greedy_token():
    assert SamplingParams(temperature=0.0, top_p=0.5, top_k=3, seed=1, max_tokens=2, stop_token_ids=(1,)).greedy
    more = ({"temperature": 0.1}, {"logprobs": 0}, {"logit_bias": {1: 1.0}}, {"repetition_penalty": 1.1})
    for changed in (*more, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}):
        assert not SamplingParams(**({"temperature": 0.0} | changed)).greedy


# ---- masks, and rows that cannot be sampled


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    vocabulary=st.sampled_from([5, 32, 33, 97]),
    seed=st.integers(0, 1 << 30),
    kinds=st.lists(st.sampled_from(["plain", "nan", "inf", "nothing", "penalty"]), min_size=1, max_size=6),
    drawn=st.booleans(),
)
def test_a_row_that_cannot_be_sampled_leaves_the_others_as_they_are(vocabulary, seed, kinds, drawn):
    logits = torch.randn(len(kinds), vocabulary, generator=torch.Generator().manual_seed(seed))
    params = {"temperature": 0.7, "top_p": 0.9} if drawn else {"temperature": 0.0}
    rows = [row(position=i, seed=seed, **params) for i in range(len(kinds))]
    clean = sample(logits.clone(), rows).tokens.tolist()
    for i, kind in enumerate(kinds):
        if kind == "nan":
            logits[i, seed % vocabulary] = torch.nan
        elif kind == "inf":
            logits[i, seed % vocabulary] = torch.inf
        elif kind == "nothing":
            logits[i] = -torch.inf
        elif kind == "penalty":
            rows[i] = row(position=i, seed=seed, presence_penalty=1.0, output=[vocabulary + 7], **params)
    out = sample(logits, rows)
    for i, kind in enumerate(kinds):
        assert (i in out.errors) == (kind == "penalty")
        if kind == "plain":
            assert out.tokens[i] == clean[i]
        elif kind != "penalty":
            assert out.tokens[i] == NOT_FINITE


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    vocabulary=st.sampled_from([5, 32, 33, 97]),
    data=st.data(),
    output=st.lists(st.integers(0, 4), max_size=6),
    min_tokens=st.integers(0, 6),
    ignore_eos=st.booleans(),
)
def test_masks_allow_what_their_definitions_allow(vocabulary, data, output, min_tokens, ignore_eos):
    tokens = st.integers(0, vocabulary - 1)
    words = data.draw(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), max_size=4))
    allowed = data.draw(st.none() | st.lists(tokens, min_size=1, max_size=vocabulary))
    params = SamplingParams(
        max_tokens=9,
        min_tokens=min_tokens,
        stop_token_ids=(vocabulary - 1,),
        ignore_eos=ignore_eos,
        bad_words=tuple(map(tuple, words)),
        allowed_token_ids=None if allowed is None else tuple(allowed),
    )
    right = set(range(vocabulary)) if allowed is None else set(allowed)
    if len(output) < min_tokens:
        right -= {vocabulary - 1} if ignore_eos else {vocabulary - 1, 3}
    right -= {word[-1] for word in words if output[len(output) - len(word) + 1 :] == word[:-1] or len(word) == 1}
    masks = masks_of(params, [3], vocabulary)
    if right != set(range(vocabulary)):
        assert any(mask.applies(len(output)) for mask in masks)
    if not right:
        with pytest.raises(UserError, match="no token may come next") as caught:
            allowed_words(masks, output, vocabulary)
        assert any(name in str(caught.value) for name in ("min_tokens", "bad_words", "allowed_token_ids"))
        return
    logits = torch.zeros(3, vocabulary)
    forbid(logits, {1: allowed_words(masks, output, vocabulary)})
    assert set((logits[1] == 0).nonzero().flatten().tolist()) == right
    assert not logits[0].any() and not logits[2].any()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 2**63),
        ("top_k", -1),
        ("temperature", 1e-40),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 1e-50),
        ("top_p", 0.0),
        ("min_p", 1.5),
        ("repetition_penalty", 1e-40),
        ("presence_penalty", float("-inf")),
        ("seed", 2**63),
        ("logprobs", 101),
        ("prompt_logprobs", -1),
        ("logit_bias", {3: float("nan")}),
        ("logit_bias", {100: 1.0}),
        ("stop_token_ids", (100,)),
        ("bad_words", ((),)),
        ("bad_words", ((1, -1),)),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (100,)),
        ("min_tokens", 17),
    ],
)
def test_what_cannot_be_computed_is_refused_by_field(field, value):
    with pytest.raises(UserError, match=field) as error:
        check_sampling(SamplingParams(**{field: value}), [], 100)
    assert error.value.field == field


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    temperature=st.sampled_from([0.0, 1e-6, 1e-5, 0.01, 1.0, 100.0]),
    top_p=st.sampled_from([1e-6, 0.5, 1.0]),
    top_k=st.sampled_from([0, 1, 2**31 - 1]),
    min_p=st.sampled_from([0.0, 1e-45, 1.0]),
    penalty=st.sampled_from([0.01, 1.0, 100.0]),
    scale=st.sampled_from([0.0, 1e-40, 1.0, 1e4]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_what_is_accepted_can_be_computed(temperature, top_p, top_k, min_p, penalty, scale, seed):
    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=penalty, seed=seed
    )
    check_sampling(params, [], 50)
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)) * scale
    out = sample(logits, [SampleRow(params, seed, 7, np.array([1, 2]), np.array([0, 1]))])
    assert not out.errors and 0 <= int(out.tokens) < 50
