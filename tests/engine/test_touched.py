"""Every step's distinct experts, as a server without --profile-dir learns them, against the choices themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.experts.base import ExpertBackend, ExpertTask
from engine.experts.reference import ReferenceExperts
from engine.linear.base import LoraBatch
from engine.model.step import StepInput, Want
from engine.steps.touched import TouchedCounter
from scheduler.plan import StepPlan
from testing.harness import Harness
from testing.models.tiny import save_hf, tiny_model
from tests.engine.parity import prompts
from tests.native.test_decoder import Family, Loaded, batch_of, loaded


class Choices:
    """Distinct experts by layer of what was posted to a backend since the last call."""

    def __init__(self, backend: ExpertBackend) -> None:
        self._seen: dict[int, int] = {}
        self._post = backend.post
        backend.post = self.post  # type: ignore[method-assign]

    def post(self, task: ExpertTask, stream: Any = None) -> None:
        ids = task.buffers.ids[: int(task.buffers.bsz)]
        self._seen[task.layer] = torch.unique(ids).numel()
        self._post(task, stream)

    def take(self) -> dict[int, int]:
        taken, self._seen = self._seen, {}
        return taken


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp("family"), count=2, mlp_only_layers=[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_hf(tiny_model(4, mlp_only_layers=[0]), path)
    return path


@pytest.fixture(scope="module")
def on(family: Family):
    with loaded(family) as made:
        yield made


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    with_lora=st.booleans(),
    padding=st.integers(1, 5),
)
def test_one_call_and_calls_by_layer_count_the_rows_that_count(
    on: Loaded, rows: list[tuple[int, int]], seed: int, with_lora: bool, padding: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    batch = batch_of([(tokens, tokens + before) for tokens, before in rows])
    tokens = batch.num_tokens
    ids = torch.randint(0, 128, (tokens,), generator=g)
    slots = torch.randint(0, 2, (tokens,), generator=g, dtype=torch.int32)
    lora = LoraBatch(slots, [(1, (slots == 1).nonzero()[:, 0])]) if with_lora else None
    keep = torch.rand(tokens, generator=g).lt(0.5).nonzero()[:, 0]
    keep = keep if len(keep) else torch.tensor([tokens - 1])
    counter, (backend,) = TouchedCounter(on.model), on.model.expert_backends
    choices = Choices(backend)

    def counted(**fields: Any) -> dict[int, int]:
        given = StepInput(ids, batch, lora, **fields)
        on.model.plan(batch)
        counter.begin()
        with torch.inference_mode():
            on.executor.forward(given)
        return counter.by_layer(counter.end())

    try:
        on.executor._whole_steps = False
        by_layers = counted(keep=keep, want=Want.GREEDY)
        assert by_layers == choices.take() and list(by_layers) == [0, 2]
        on.executor._whole_steps = True
        assert counted(keep=keep, want=Want.GREEDY) == by_layers
        assert not choices.take(), "one call posts nothing in Python"
        valid = max(0, tokens - padding)
        found = counted(bsz=torch.tensor([valid], dtype=torch.int32))
        assert found == choices.take() and (valid or found == {0: 0, 2: 0})
    finally:
        on.executor._whole_steps = True
        del backend.post  # type: ignore[method-assign]


def spied(engine: Harness) -> tuple[dict[int, dict[int, int]], list[tuple[int, int | None]]]:
    """By launched step, what it posted; and (step, experts) as the scheduler's cost model was told."""
    runner, scheduler = engine.runner, engine.core.scheduler
    (backend,) = runner.model.expert_backends
    choices, posted = Choices(backend), dict[int, dict[int, int]]()
    launch: Callable[..., Any] = runner.launch_forward
    told: list[tuple[int, int | None]] = []
    observe = scheduler._cost.observe

    def launch_forward(plan: StepPlan, *args: Any) -> Any:
        choices.take()  # of a launch that failed
        step = launch(plan, *args)
        posted[plan.step] = choices.take()
        return step

    def learn(plan: StepPlan, seconds: float, experts: int | None) -> None:
        told.append((plan.step, experts))
        observe(plan, seconds, experts)

    runner.launch_forward = launch_forward  # type: ignore[method-assign]
    scheduler._cost.observe = learn  # type: ignore[method-assign]
    return posted, told


@pytest.mark.parametrize("rules", ["reference", None])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("graphs", ["off", "padded"])
def test_the_scheduler_is_told_of_every_step(folder, rules, overlap, graphs) -> None:
    """The right step's, with two of them in flight, and without a profile."""
    sizes = {"max_num_batched_tokens": 16, "max_num_seqs": 8}
    engine = Harness(folder, rules=rules, overlap=overlap, itl_target_ms=1e6, cuda_graphs=graphs, **sizes)
    if rules is None:
        engine.runner.executor._whole_steps = False  # so that the choices are seen
    assert not engine.runner.tracing
    posted, told = spied(engine)
    engine.generate(prompts(3, [20, 5, 9]), max_tokens=6)
    assert len(told) == len(posted) > 6
    assert told == [(step, sum(layers.values())) for step, layers in posted.items()]
    stats = engine.core.stats()
    assert stats["experts_touched"] == sum(experts for _, experts in told if experts) > 0
    assert stats["expert_layers"] == sum(map(len, posted.values())) == stats["steps"]
    assert engine.core.scheduler._cost._experts, "the term of the cost model has something to learn from"
    engine.close()


def test_a_step_that_failed_leaves_nothing_to_the_next(folder, monkeypatch) -> None:
    engine = Harness(folder, itl_target_ms=1e6)
    posted, told = spied(engine)
    broken = engine.runner.executor.forward

    def forward(step: StepInput) -> Any:
        broken(step)
        raise RuntimeError("behind the experts")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.executor, "forward", forward)
        engine.submit(prompts(1, [12])[0])
        engine.run()
    assert not told and not posted
    engine.generate(prompts(2, [4]), max_tokens=3)
    assert told == [(step, sum(layers.values())) for step, layers in posted.items()]
    engine.close()


def test_where_nobody_counts_nothing_is_said(folder, monkeypatch) -> None:
    monkeypatch.setattr(ReferenceExperts, "offers", ())
    engine = Harness(folder, itl_target_ms=1e6)
    _, told = spied(engine)
    engine.generate(prompts(2, [4]), max_tokens=3)
    assert told and all(experts is None for _, experts in told)
    assert engine.core.stats()["experts_touched"] == engine.core.stats()["expert_layers"] == 0
    engine.close()
