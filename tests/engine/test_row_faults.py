"""What goes wrong in one row ends that row's request; the others of the step never notice."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.grammar.masks import TokenMask
from engine.messages import Failed, Finished, Refused
from testing.harness import Harness
from testing.models.tiny import save_hf, tiny_model
from tests.engine.parity import BACKENDS, prompts

BAD = 77  # a token whose hidden states are not finite


class Faulty(TokenMask):
    """Forbids nothing, then raises."""

    def __init__(self, after: int) -> None:
        self.after = after

    def applies(self, num_output: int) -> bool:
        return True

    def restrict(self, words, output) -> None:
        if len(output) >= self.after:
            raise RuntimeError("the grammar is stuck")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_hf(tiny_model(5), path)
    return path


FAULTS = {
    "nan": (Failed, "logits are not finite"),
    "inf": (Failed, "logits are not finite"),
    "mask": (Failed, "the grammar is stuck"),
    "nothing allowed": (Failed, "no token may come next, after 2 of output: none is left by allowed_token_ids and bad"),
    "huge top_k": (Refused, "top_k is 9223372036854775808, must be from 0 to"),
    "tiny temperature": (Refused, "temperature is 1e-40, must be 0"),
    "tiny top_p": (Refused, "top_p is 1e-50, must be from 1e-06 to 1"),
}


def submit_fault(engine: Harness, kind: str, number: int, drawn: bool) -> str:
    prompt = prompts(number, [9])[0]
    plain = {"temperature": 1.0} if drawn else {}
    if kind in ("nan", "inf"):
        prompt[4 + number % 5] = BAD + (kind == "inf")
        return engine.submit(prompt, **plain)
    if kind == "nothing allowed":
        return engine.submit(prompt, allowed_token_ids=(5,), bad_words=((5, 5, 5),), **plain)
    if kind == "mask":
        rid = engine.submit(prompt, **plain)
        engine.core._masks[rid] = [Faulty(number % 3)]
        return rid
    name = kind.split()[1]
    return engine.submit(prompt, **{name: {"top_k": 2**63, "temperature": 1e-40, "top_p": 1e-50}[name]})


def poison(engine: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    model = engine.core.runner.model
    embed = model.embed

    def poisoned(ids: torch.Tensor) -> torch.Tensor:
        out = embed(ids).clone()
        out[ids == BAD] = torch.nan
        out[ids == BAD + 1] = torch.inf
        return out

    monkeypatch.setattr(model, "embed", poisoned)


@BACKENDS
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(st.sampled_from([*FAULTS, "fine"]), min_size=1, max_size=5),
    drawn=st.booleans(),
    mode=st.sampled_from(
        [
            {},
            {"overlap": True},
            {"speculate": "ngram:3:always"},
            {"cuda_graphs": "padded", "speculate": "ngram:3", "overlap": True},
        ]
    ),
)
def test_a_fault_ends_its_own_request(folder, backend, kinds, drawn, mode):
    params = {"temperature": 0.8, "seed": 3} if drawn else {}
    fine = {i: [t for t in prompts(i, [12])[0] if t < BAD] * 2 for i in range(3)}
    with pytest.MonkeyPatch.context() as monkeypatch:
        engine = Harness(folder, max_num_seqs=8, kv_cache_tokens=256, prefix_caching=False, **mode, **backend)
        poison(engine, monkeypatch)
        below = {"allowed_token_ids": tuple(range(BAD)), "max_tokens": 12, **params}
        alone = [engine.generate([prompt], **below)[0] for prompt in fine.values()]
        rids = [engine.submit(prompt, **below) for prompt in fine.values()]
        faulty = [(kind, submit_fault(engine, kind, i, drawn)) for i, kind in enumerate(kinds) if kind != "fine"]
        engine.run()
        for rid, expected in zip(rids, alone, strict=True):
            assert isinstance(engine.results[rid].end, Finished), engine.results[rid].end
            assert engine.results[rid].tokens == expected
        for kind, rid in faulty:
            end, (sort, text) = engine.results[rid].end, FAULTS[kind]
            assert isinstance(end, sort) and text in end.message, (kind, end)
        # nothing of it is left in the blocks that others get now
        assert [engine.generate([prompt], **below)[0] for prompt in fine.values()] == alone
        assert engine.core.stats()["failed_steps"] == 0
        engine.close()


@BACKENDS
def test_greedy_rows_without_masks_notice_it_too(folder, backend, monkeypatch, caplog):
    """The path on which nobody asks for logits."""
    engine = Harness(folder, **backend)
    poison(engine, monkeypatch)
    rids = [engine.submit([3, 4, BAD, 5]), engine.submit([3, 4, 5])]
    with caplog.at_level(logging.ERROR):
        engine.run()
    assert isinstance(engine.results[rids[0]].end, Failed) and isinstance(engine.results[rids[1]].end, Finished)
    assert f"request {rids[0]} failed: the model's logits are not finite" in caplog.text
    engine.close()


@BACKENDS
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    min_tokens=st.integers(0, 8),
    words=st.lists(st.lists(st.integers(2, 6), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    allowed=st.sets(st.integers(0, 12), min_size=6),
    drawn=st.booleans(),
    mode=st.sampled_from(
        [{}, {"overlap": True}, {"overlap": True, "speculate": "ngram:3"}, {"speculate": "ngram:3:always"}]
    ),
)
def test_no_forbidden_token_ever_comes(folder, backend, min_tokens, words, allowed, drawn, mode):
    params = {"temperature": 5.0, "seed": 1} if drawn else {}
    engine = Harness(folder, **mode, **backend)
    bystander = engine.generate([[8, 9, 10]], max_tokens=8)
    left = allowed - {word[0] for word in words if len(word) == 1} - {12}
    rid = engine.submit(
        [3, 4, 5],
        max_tokens=16,
        min_tokens=min_tokens,
        bad_words=words,
        allowed_token_ids=tuple(sorted(allowed | {12})),
        stop_token_ids=(12,),
        **params,
    )
    beside = engine.submit([8, 9, 10], max_tokens=8)
    result = engine.run()[rid]
    tokens = result.tokens
    assert engine.results[beside].tokens == bystander[0]
    if isinstance(result.end, Failed):
        assert "no token may come next" in result.end.message
    elif isinstance(result.end, Refused):
        assert not left and min_tokens
    else:
        assert len(tokens) >= min_tokens
    assert set(tokens) <= allowed
    for word in words:
        assert all(tuple(tokens[i : i + len(word)]) != word for i in range(len(tokens)))
    engine.close()
