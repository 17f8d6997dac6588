"""Long prompts beside decode rows, on a thread of their own: the tokens are those of one step after the other."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.experts.reference import ReferenceExperts
from engine.launch import assemble
from engine.messages import Abort, Failed, Finished
from engine.model.beside import model_beside
from engine.planning.plan import EnginePlan
from engine.steps.lane import PromptLane
from engine.steps.runner import ModelRunner
from testing.harness import Harness, greedy
from testing.models.tiny import save_hf, tiny_model
from tests.engine.parity import CLEAR

LEAST = 12  # tokens of a step of the lane


class SlowExperts(ReferenceExperts):
    """Takes its time in between, and fails when it is told to."""

    wait_s = 0.0
    fails = False

    def post(self, task: Any, stream: Any = None) -> None:
        time.sleep(self.wait_s)
        if self.fails:
            raise EngineError("the bus is gone")
        super().post(task, stream)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = tiny_model(3, family="qwen3_moe")
    folder = tmp_path_factory.mktemp("model")
    save_hf(model, folder)
    return model, folder


def with_lanes(patch: pytest.MonkeyPatch) -> list[SlowExperts]:
    """Engines have a lane whose experts are computed here; the experts of each."""
    made: list[SlowExperts] = []

    def make_lane(plan: EnginePlan, runner: ModelRunner) -> PromptLane:
        experts = SlowExperts(torch.float32, torch.device("cpu"))
        for layer in runner.model.sparse:
            experts.load_layer(layer, plan.source.experts(layer))
        made.append(experts)
        model = model_beside(runner.model, experts, plan.token_budget)
        return PromptLane(
            ModelRunner(model, runner.device, plan.config.seed, max_rows=plan.config.max_num_seqs), runner
        )

    patch.setattr(assemble, "make_lane", make_lane)
    patch.setattr(assemble, "lane_tokens", lambda lane: LEAST)
    return made


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> list[SlowExperts]:
    return with_lanes(monkeypatch)


def drawn(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 100) for _ in range(tokens)]


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(
    lengths=st.lists(st.sampled_from([3, 9, 13, 30, 60, 90]), min_size=2, max_size=8),
    overlap=st.booleans(),
    tight=st.booleans(),
    wait_s=st.sampled_from([0.0, 0.003]),
    seed=st.integers(0, 100),
)
def test_tokens_are_those_of_one_step_after_the_other(
    model_folder, lengths: list[int], overlap: bool, tight: bool, wait_s: float, seed: int
) -> None:
    """Whatever arrives while whatever runs, with prefixes that are shared, and preempted where the cache is tight."""
    shared, model = drawn(0, 40), model_folder[0]
    asked = [(shared + drawn(seed + i, n) if i % 3 == 0 else drawn(seed + i, n)) for i, n in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        made = with_lanes(patch)
        engine = Harness(
            model_folder[1], kv_cache_tokens=256 if tight else 1024, max_model_len=160, max_num_batched_tokens=48,
            max_num_seqs=4, overlap=overlap,
        )  # fmt: skip
        made[0].wait_s = wait_s
        names = []
        for prompt in asked:
            names.append(engine.submit(prompt, max_tokens=12))
            for _ in range(seed % 4):
                engine.core.step()
        engine.run()
        used = engine.core.prompts
        engine.close()
    assert used is not None and used.plan is None
    for name, prompt in zip(names, asked, strict=True):
        tokens, gap = greedy(model, prompt, 12, engine.results[name].tokens)
        assert isinstance(engine.results[name].end, Finished)
        assert engine.results[name].tokens == tokens or gap < CLEAR


def test_streams_go_on_while_a_long_prompt_is_computed(model_folder, lanes) -> None:
    engine = Harness(model_folder[1], max_model_len=512, max_num_batched_tokens=64)
    experts = lanes[0]
    stream = engine.submit(drawn(1, 5), max_tokens=200)
    engine.until(lambda: len(engine.results[stream].tokens) > 2)
    computing, go = threading.Event(), threading.Event()

    def post(task: Any, stream: Any = None) -> None:
        computing.set()
        assert go.wait(60)
        ReferenceExperts.post(experts, task, stream)

    experts.post = post  # type: ignore[method-assign]
    long = engine.submit(drawn(2, 60), max_tokens=4)
    engine.until(computing.is_set)
    before = len(engine.results[stream].tokens)
    engine.until(lambda: len(engine.results[stream].tokens) > before + 20)
    assert not engine.results[long].tokens
    go.set()
    engine.run()
    engine.close()
    for name, prompt, count in ((stream, drawn(1, 5), 200), (long, drawn(2, 60), 4)):
        tokens, gap = greedy(model_folder[0], prompt, count, engine.results[name].tokens)
        assert engine.results[name].tokens == tokens or gap < CLEAR


@pytest.mark.parametrize("aborted", [False, True])
def test_what_fails_in_the_lane_ends_its_requests_alone(model_folder, lanes, aborted: bool) -> None:
    engine = Harness(model_folder[1], max_model_len=256, max_num_batched_tokens=64)
    lanes[0].fails = True
    stream = engine.submit(drawn(1, 5), max_tokens=40)
    engine.until(lambda: engine.results[stream].tokens)
    long = engine.submit(drawn(2, 60), max_tokens=4)
    if aborted:
        engine.core.step()
        engine.core.handle(Abort(request_id=long))
    engine.run()
    end = engine.results[long].end
    assert aborted or (isinstance(end, Failed) and "the bus is gone" in end.message)
    lanes[0].fails = False
    again = engine.submit(drawn(2, 60), max_tokens=4)
    engine.run()
    engine.close()
    for name, prompt, count in ((stream, drawn(1, 5), 40), (again, drawn(2, 60), 4)):
        tokens, gap = greedy(model_folder[0], prompt, count, engine.results[name].tokens)
        assert engine.results[name].tokens == tokens or gap < CLEAR


def test_an_engine_is_closed_while_the_lane_computes(model_folder, lanes) -> None:
    engine = Harness(model_folder[1], max_model_len=256, max_num_batched_tokens=64)
    lanes[0].wait_s = 0.05
    engine.submit(drawn(2, 60), max_tokens=4)
    engine.core.step()
    assert engine.core.prompts is not None and engine.core.prompts.plan is not None
    engine.close()
    assert engine.core.prompts.plan is None
    assert not any(thread.name.startswith("prompts") for thread in threading.enumerate())
