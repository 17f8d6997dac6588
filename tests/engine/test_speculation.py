"""`--speculate`: the same tokens and log-probabilities as without, in fewer steps."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.config import EngineConfig
from engine.errors import UserError
from engine.messages import Finished, StopFound
from engine.planning.drafts import PADDED_DRAFTS, check_mtp
from engine.planning.plan import plan_engine
from scheduler.request import ThinkingBudget
from testing.harness import Harness
from testing.models.tiny import save_hf, tiny_model
from tests.engine.family import Family
from tests.engine.parity import BACKENDS, prompts

SHAPES = [{}, {"num_experts": 16, "head_dim": 32, "num_attention_heads": 2}, {"tie_word_embeddings": True}]


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> list[Family]:
    return [Family(tmp_path_factory.mktemp("family"), count=1, **shape) for shape in SHAPES]


def requests(draw) -> list[tuple[list[int], dict]]:
    """Prompts that repeat themselves and ones that do not; greedy, drawn, penalised and masked rows."""
    made = []
    for _i in range(draw(st.integers(1, 4))):
        prompt = prompts(draw(st.integers(0, 99)), [draw(st.integers(1, 20))])[0] * draw(st.integers(1, 3))
        options = draw(
            st.fixed_dictionaries(
                {"max_tokens": st.integers(1, 24)},
                optional={
                    "temperature": st.sampled_from([0.3, 1.0]),
                    "seed": st.integers(0, 9),
                    "repetition_penalty": st.sampled_from([0.5, 1.2]),
                    "frequency_penalty": st.just(0.7),
                    "logit_bias": st.just({5: 3.0}),
                    "logprobs": st.integers(0, 2),
                    "bad_words": st.just(((5, 5), (9,))),
                    "allowed_token_ids": st.just(tuple(range(5, 12))),
                    "stop_token_ids": st.just((7, 11)),
                    "thinking": st.builds(
                        ThinkingBudget, st.integers(0, 9), st.just(None), st.just(6), st.just((8, 6))
                    ),
                },
            )
        )
        if "stop_token_ids" in options:
            options["min_tokens"] = min(options["max_tokens"], draw(st.integers(0, 6)))
        made.append((prompt, options | {"adapter": draw(st.sampled_from([None, "adapter-0"]))}))
    return made


@BACKENDS
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    shape=st.integers(0, 2),
    kind=st.sampled_from(["ngram", "suffix"]),
    k=st.integers(1, 8),
    budget=st.sampled_from([8, 64]),
    overlap=st.booleans(),
    graphs=st.sampled_from(["off", "padded"]),
)
def test_tokens_are_those_of_one_token_a_step(families, backend, data, shape, kind, k, budget, overlap, graphs):
    asked = requests(data.draw)
    runs = []
    for speculate in (None, f"{kind}:{k}:always", f"{kind}:{k}"):
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": budget}
        engine = families[shape].engine(speculate=speculate, overlap=overlap, cuda_graphs=graphs, **sizes, **backend)
        rids = [engine.submit(prompt, **options) for prompt, options in asked]
        results = engine.run()
        runs.append([results[rid] for rid in rids])
        stats = engine.core.stats()
        assert stats["accepted_tokens"] <= stats["drafted_tokens"]
        engine.close()
    first, *others = runs
    for plain, drafted in [(p, d) for other in others for p, d in zip(first, other, strict=True)]:
        assert isinstance(plain.end, Finished)
        ends = [replace(run.end, stop_logprobs=None) for run in (plain, drafted)]  # equal within rounding, as all are
        assert plain.tokens == drafted.tokens and ends[0] == ends[1]
        assert [(p.chosen.token, p.chosen.rank) for p in plain.logprobs] == [
            (d.chosen.token, d.chosen.rank) for d in drafted.logprobs
        ]
        for one, other in zip(plain.logprobs, drafted.logprobs, strict=True):
            assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_hf(tiny_model(5), path)
    return path


def test_a_text_that_repeats_itself_takes_fewer_steps(folder):
    steps = []
    for speculate in (None, "ngram:4:always"):
        engine = Harness(folder, speculate=speculate)
        # one token again and again, whatever the model says: every draft is right once it has been seen
        engine.generate([[3, 4, 5]], max_tokens=40, allowed_token_ids=(9,))
        steps.append(engine.core.stats()["steps"])
        drafted = engine.core.stats()
        engine.close()
    assert steps[0] == 40 and steps[1] <= 14
    assert drafted["accepted_tokens"] == drafted["drafted_tokens"] > 24


def test_a_stop_string_ends_within_a_run_of_drafts(folder):
    engine = Harness(folder, speculate="ngram:4:always")
    rid = engine.submit([3, 4, 5], max_tokens=40, allowed_token_ids=(9,))
    engine.until(lambda: len(engine.results[rid].tokens) > 8)
    engine.core.handle(StopFound(request_id=rid, num_tokens=7))
    engine.run()
    end = engine.results[rid].end
    assert isinstance(end, Finished) and (end.reason, end.output_tokens) == ("stop", 7)
    engine.close()


@pytest.mark.parametrize(
    "wrong",
    [
        "ngram",
        "ngram:",
        "ngram:0",
        "ngram:33",
        "ngram:+1",
        "ngram: 1",
        "draft:2",
        "4",
        "",
        "ngram:4:",
        "suffix:4:ever",
        "suffix",
        "mtp:33",
        "mtp",
    ],
)
def test_what_cannot_be_is_refused(folder, wrong):
    with pytest.raises(UserError, match=r"ngram:K, suffix:K or mtp:K is expected, K from 1 to 32"):
        plan_engine(EngineConfig(model=str(folder), speculate=wrong))


@pytest.mark.parametrize("always", ["", ":always"])
def test_beside_overlap_steps_that_have_no_drafts_are_launched_ahead(folder, always, monkeypatch):
    """Of a text that repeats itself steps wait for each other's tokens, of one that does not none does."""
    steps, ahead = {}, {}
    for overlap in (False, True):
        for repeats in (True, False):
            engine = Harness(folder, speculate=f"ngram:4{always}", overlap=overlap)
            launched: list[bool] = []  # whether another step was in flight
            launch, read, open_steps = engine.runner.launch_forward, engine.runner.tokens, []

            def record(plan, masks, launch=launch, launched=launched, open_steps=open_steps):
                launched.append(bool(open_steps))
                open_steps.append(plan)
                return launch(plan, masks)

            def close(step, read=read, open_steps=open_steps):
                open_steps.remove(step.plan)
                return read(step)

            monkeypatch.setattr(engine.runner, "launch_forward", record)
            monkeypatch.setattr(engine.runner, "tokens", close)
            allowed = {"allowed_token_ids": (9,)} if repeats else {"repetition_penalty": 2.0}
            engine.generate([[3, 4, 5]], max_tokens=40, **allowed)
            steps[overlap, repeats], ahead[overlap, repeats] = engine.core.stats()["steps"], sum(launched)
            engine.close()
    assert not ahead[False, True] and not ahead[False, False]
    if always:
        assert steps[True, True] <= steps[False, True] + 2 <= 20
        assert ahead[True, True] <= 2  # before the last tokens, behind which no drafts are wanted
    else:  # what drafts cost is measured
        assert steps[True, True] < 40 and ahead[True, False] == steps[True, False] - 1 == 39


def test_drafts_by_the_model_exclude_overlap(folder):
    with pytest.raises(UserError, match="leave out --overlap"):
        check_mtp(EngineConfig(model=str(folder), speculate="mtp:2", overlap=True))


def test_steps_with_drafts_are_padded(folder, monkeypatch):
    """Drafts are rows of their own; steps of more rows than the largest size are not padded."""
    engine = Harness(folder, speculate="ngram:8:always", cuda_graphs="padded", max_num_seqs=6)
    padded = engine.runner.padded
    assert padded is not None and padded.buckets[-1] == 6 + PADDED_DRAFTS
    seen, launch = [], padded.launch
    monkeypatch.setattr(padded, "launch", lambda arrays: (seen.append(arrays.num_tokens), launch(arrays))[1])
    plans, forward = [], engine.runner.launch_forward
    monkeypatch.setattr(
        engine.runner, "launch_forward", lambda plan, masks: (plans.append(plan), forward(plan, masks))[1]
    )
    engine.generate([[3 + i, 4, 5] for i in range(6)], max_tokens=24, allowed_token_ids=(9,))
    decodes = [plan for plan in plans if plan.num_decodes == len(plan.rows)]
    assert seen == [plan.num_tokens for plan in decodes if plan.num_tokens <= padded.buckets[-1]]
    assert any(len(plan.rows) < plan.num_tokens <= padded.buckets[-1] for plan in decodes)
    assert any(plan.num_tokens > padded.buckets[-1] for plan in decodes)
    engine.close()
