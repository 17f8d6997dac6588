"""The model of step time and the chunks it allows."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.plan import StepPlan, StepRow, pairs
from scheduler.policy.cost import MIN_SAMPLES, CostModel
from scheduler.policy.room import PacedRoom
from tests.scheduler.harness import FakeEngine, config, make_request


def plan(num_decodes: int, chunk: int, context: int) -> StepPlan:
    request = make_request("a", [1])
    rows = [StepRow(request, context, 1, 0, True) for _ in range(num_decodes)]
    if chunk:
        rows.append(StepRow(request, 0, chunk, 0, True))
    return StepPlan(0, rows, [()] * len(rows))


def seconds_of(step: StepPlan, experts: int) -> float:
    read = sum(pairs(r.start, r.num_tokens) for r in step.rows)
    return 0.002 + 0.0005 * step.num_tokens + 0.0001 * experts + 1e-7 * read


def experts_of(tokens: int) -> int:
    return round(128 * (1 - (1 - 8 / 128) ** tokens))


def trained(noise: float = 0.0, num_steps: int = 300) -> CostModel:
    rng = random.Random(5)
    model = CostModel(64)
    for _ in range(num_steps):
        step = plan(rng.randint(1, 32), rng.choice([0, 0, 16, 64, 200]), rng.randint(10, 2000))
        experts = experts_of(step.num_tokens)
        hiccup = 50.0 if noise and rng.random() < 0.03 else 1.0
        model.observe(step, seconds_of(step, experts) * hiccup * (1 + noise * rng.uniform(-1, 1)), experts)
    return model


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.1), (0.2, 0.35)])
def test_it_learns_the_time_of_a_step(noise: float, tolerance: float) -> None:
    model = trained(noise)
    for decodes, chunk, context in ((1, 0, 500), (8, 0, 1000), (8, 64, 1000), (32, 200, 2000)):
        step = plan(decodes, chunk, context)
        read = sum(pairs(r.start, r.num_tokens) for r in step.rows)
        expected = seconds_of(step, experts_of(step.num_tokens))
        assert model.predict(step.num_tokens, read) == pytest.approx(expected, rel=tolerance)


def test_the_chunk_keeps_the_target_and_uses_it() -> None:
    model = trained()
    for target in (0.05, 0.1, 0.2):
        chunk = model.chunk(8, 8 * 501, 0, 512, target, 16)
        time = seconds_of(plan(8, chunk, 500), experts_of(8 + chunk))
        assert 0.8 * target < time < 1.15 * target
    assert model.chunk(8, 4000, 0, 512, 100.0, 16) == 512
    assert model.chunk(8, 4000, 0, 512, 1e-6, 16) == 16  # prefill goes on
    assert model.chunk(8, 4000, 0, 5, 1e-6, 16) == 5
    assert model.chunk(8, 4000, 0, 512, 1e-6, -3) == 0
    deep = model.chunk(8, 8 * 501, 50_000, 512, 0.1, 16)
    assert deep < model.chunk(8, 8 * 501, 0, 512, 0.1, 16), "what is behind a long context takes longer"
    far = StepPlan(0, [*plan(8, 0, 500).rows, StepRow(make_request("b", [1]), 50_000, deep, 0, True)], [()] * 9)
    assert seconds_of(far, experts_of(8 + deep)) < 0.115


def test_without_samples_the_chunk_is_cautious() -> None:
    model = CostModel(64)
    decodes = plan(4, 0, 10).rows
    for budget, fits in ((512, 64), (10, 10)):
        room = PacedRoom(budget, decodes, model, 10.0, 16)
        assert room.fit(0, 40) == min(40, fits)
        room.take(0, min(40, fits))
        assert room.fit(0, 40) == fits - min(40, fits), "all chunks of a step together"
    for _ in range(MIN_SAMPLES):
        model.observe(plan(4, 0, 10), 0.001, None)
    assert PacedRoom(512, decodes, model, 10.0, 16).fit(0, 512) == 512


def test_the_chunks_of_a_step_keep_the_target_together() -> None:
    model = trained()
    room, taken = PacedRoom(512, plan(8, 0, 500).rows, model, 0.1, 16), []
    while room.num_tokens > 0:
        size = room.fit(1000, 30)
        room.take(1000, size)
        taken.append(size)
    rows = [*plan(8, 0, 500).rows, *(StepRow(make_request("b", [1]), 1000, size, 0, True) for size in taken if size)]
    assert len(taken) > 2 and taken[0] == 30 > taken[-1]
    assert 0.08 < seconds_of(StepPlan(0, rows, [()] * len(rows)), experts_of(8 + sum(taken))) < 0.115


def test_more_work_is_never_predicted_to_take_less() -> None:
    rng = random.Random(2)
    model = CostModel(64)
    for _ in range(200):
        model.observe(
            plan(rng.randint(1, 9), rng.choice([0, 50]), rng.randint(1, 99)), rng.random(), rng.randint(1, 99)
        )
        assert model.predict(1, 10) >= 0
        for tokens in range(1, 100, 7):
            assert model.predict(tokens + 7, 100) >= model.predict(tokens, 100) - 1e-12
            assert model.predict(tokens, 200) >= model.predict(tokens, 100) - 1e-12


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_it_expects_the_experts_of_steps_between_those_that_it_has_seen(data: st.DataObject) -> None:
    """A few decode rows and a chunk were seen; in between, experts grow as tokens choose them independently."""
    total = data.draw(st.sampled_from([8, 32, 128, 256, 512]))
    each = data.draw(st.integers(1, min(16, total // 2)))
    few, many = data.draw(st.integers(1, 32)), data.draw(st.integers(64, 1024))
    tokens = data.draw(st.integers(few, many))
    model, rng = CostModel(64), random.Random(3)
    for count in [few, many] * 30:
        touched = round(48 * total * (1 - (1 - each / total) ** count) * rng.uniform(0.9, 1.1))
        model.observe(plan(count, 0, 0), 1e-4 * touched, touched)  # a step's time is that of its experts
    expected = 1e-4 * 48 * total * (1 - (1 - each / total) ** tokens)
    assert 0.45 * expected < model.predict(tokens, tokens) < 1.5 * expected


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0])
def test_times_that_cannot_be_are_left_out(seconds: float) -> None:
    model = trained()
    before = model.predict(10, 100)
    model.observe(plan(1, 0, 1), seconds, 3)
    assert model.predict(10, 100) == before


def test_it_follows_a_machine_that_becomes_slower() -> None:
    model = trained()
    rng = random.Random(6)
    for _ in range(200):
        step = plan(rng.randint(1, 32), rng.choice([0, 16, 64]), 500)
        model.observe(step, 3 * seconds_of(step, experts_of(step.num_tokens)), experts_of(step.num_tokens))
    step = plan(8, 64, 500)
    expected = 3 * seconds_of(step, experts_of(72))
    assert model.predict(72, sum(pairs(r.start, r.num_tokens) for r in step.rows)) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("budget", [512, 8192])
def test_running_streams_keep_their_pace_while_a_long_prompt_is_read(budget: int) -> None:
    def time_of(step: StepPlan) -> float:
        return seconds_of(step, experts_of(step.num_tokens))

    engine = FakeEngine(
        config(num_blocks=2000, max_model_len=4000, max_num_batched_tokens=budget, itl_target_s=0.05), dt=0.05
    )
    for i in range(3):
        engine.add(make_request(f"stream{i}", [i] * 5, 400))
    for _ in range(20):
        step = engine.step()
        engine.scheduler.observe(step, time_of(step), experts_of(step.num_tokens))
    engine.add(make_request("long", [9] * 2000, 2))
    mixed = []
    while "long" not in engine.terminal:
        step = engine.step()
        engine.scheduler.observe(step, time_of(step), experts_of(step.num_tokens))
        if len(step.rows) == 4 and not all(r.is_decode for r in step.rows):
            mixed.append(step)
    late = [time_of(step) for step in mixed[10:-1]]
    assert late and max(late) < 0.06
    assert min(step.rows[-1].num_tokens for step in mixed[10:-1]) > 16


@pytest.mark.parametrize("known", [False, True])
def test_the_first_chunk_is_as_long_as_known_times_allow(known: bool) -> None:
    engine = FakeEngine(
        config(num_blocks=2000, max_model_len=4000, max_num_batched_tokens=2048, itl_target_s=0.1), dt=0.05
    )
    tried = [plan(0, tokens, 0) for tokens in (64, 128, 256, 512, 1024, 2048)] + [plan(n, 0, 64) for n in (1, 8, 32)]
    for step in tried if known else ():
        engine.scheduler.learn(step, seconds_of(step, experts_of(step.num_tokens)), experts_of(step.num_tokens))
    engine.add(make_request("stream", [1] * 5, 10))
    engine.step()
    engine.add(make_request("prompt", [2] * 3000, 2))
    step = engine.step()
    if known:
        assert 0.08 < seconds_of(step, experts_of(step.num_tokens)) < 0.11
    else:
        assert step.rows[-1].num_tokens == engine.scheduler.config.initial_chunk


def test_the_target_is_some_decode_steps_where_they_are_slow() -> None:
    """And what prefill alone takes in long chunks, which are computed in another way, does not count."""
    settings = {"itl_target_s": 0.05, "itl_decode_steps": 3.0, "long_chunk": 512}
    engine = FakeEngine(config(num_blocks=2000, max_model_len=4000, max_num_batched_tokens=1024, **settings), dt=0.05)

    def run(step: StepPlan) -> float:
        streamed = step.num_tokens >= 512 and not step.rows[0].is_decode
        seconds = 0.01 if streamed else 0.1 + 0.001 * step.num_tokens
        engine.scheduler.observe(step, seconds, None)
        return seconds

    engine.add(make_request("first", [3] * 2048, 1))
    for _ in range(2):
        assert run(engine.step()) == 0.01
    engine.add(make_request("stream", [1] * 5, 600))
    for _ in range(20):
        run(engine.step())
    engine.add(make_request("long", [9] * 1800, 2))
    mixed = []
    while "long" not in engine.terminal:
        step = engine.step()
        mixed.append(run(step))
    assert 0.2 < max(mixed[4:-1]) < 0.35


def test_chunks_are_long_only_while_no_stream_waits() -> None:
    engine = FakeEngine(config(num_blocks=200, max_model_len=600, max_num_batched_tokens=64, mixed_chunk=10))
    engine.add(make_request("first", [1] * 150, 40))
    alone = [engine.step().num_tokens for _ in range(3)]
    assert alone == [64, 64, 22]
    engine.add(make_request("second", [2] * 150, 2))
    beside = [engine.step() for _ in range(4)]
    assert [[row.num_tokens for row in step.rows] for step in beside] == [[1, 10]] * 4


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(
    streams=st.integers(4, 8),
    prompts=st.integers(8, 16),
    size=st.sampled_from([200, 512]),
    depth=st.sampled_from([0, 1]),
)
def test_prompts_that_come_together_use_the_time_that_streams_may_wait(
    streams: int, prompts: int, size: int, depth: int
) -> None:
    """Also while more and more of them are streams, of which no step alone was seen."""
    settings = {"itl_target_s": 0.02, "itl_decode_steps": 3.0, "max_num_seqs": 32, "max_model_len": 2000}
    engine = FakeEngine(
        config(num_blocks=4000, max_num_batched_tokens=1024, prefix_caching=False, **settings), depth
    )  # fmt: skip

    def seconds(rows: Sequence[StepRow]) -> float:
        tokens = sum(row.num_tokens for row in rows)
        return 0.002 + 0.0002 * tokens + 0.001 * experts_of(tokens)

    def run() -> StepPlan | None:
        step = engine.step()
        if step is not None:
            engine.scheduler.observe(step, seconds(step.rows), experts_of(step.num_tokens))
        return step

    for i in range(streams):
        engine.add(make_request(f"stream{i}", [i] * 5, 1000))
    for _ in range(30):
        run()
    for i in range(prompts):
        engine.add(make_request(f"prompt{i}", [i] * size, 1000))
    waiting = [engine.submitted[f"prompt{i}"] for i in range(prompts)]
    used: list[float] = []  # shares of that time, by steps of more than the least chunk
    while any(request.num_computed < size for request in waiting):
        step = run()
        assert step is not None
        decodes = step.rows[: step.num_decodes]
        cut = any(request.num_computed < size for request in waiting)
        if cut and decodes and step.num_tokens - len(decodes) > engine.config.min_chunk:
            used.append(seconds(step.rows) / max(0.02, 3 * seconds(decodes)))
    del used[:3]  # in which it learns
    assert 0.95 < statistics.mean(used) < 1.15
