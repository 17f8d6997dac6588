"""Streams of tenants that have many leave steps out where few of another tenant would have to wait for them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.plan import StepPlan
from scheduler.policy.turns import PRESENT_S, SELDOM
from tests.scheduler.harness import FakeEngine, config, make_request

ROW_S = 0.001  # of a step, by the clock of these tests, behind
BASE_S = 0.001
TARGET_S = 0.0095  # eight rows


def run(engine: FakeEngine) -> StepPlan:
    step = engine.step()
    engine.scheduler.observe(step, BASE_S + ROW_S * step.num_tokens, None)
    return step


def start(streams: dict[str, int], weights: dict[str, float], depth: int = 0, **changes: object) -> FakeEngine:
    """An engine whose requests are all behind their prompts and whose cost model knows the clock."""
    settings = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "num_blocks": 4000, "max_model_len": 4000}
    engine = FakeEngine(config(**{**settings, "itl_target_s": TARGET_S, **changes}), depth)
    for tenant, count in streams.items():
        for i in range(count):
            engine.add(make_request(f"{tenant}{i}", [i % 40, len(tenant)], 500, tenant=tenant), weights[tenant])
    for _ in range(30):
        run(engine)
    return engine


@settings(max_examples=8)
@given(
    counts=st.lists(st.integers(1, 16), min_size=2, max_size=3),
    weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=3, max_size=3),
)
def test_each_tenant_has_its_share_of_a_step_and_its_streams_take_turns(counts: list[int], weights: list[float]):
    streams = dict(zip("abc", counts, strict=False))
    weight = dict(zip("abc", weights, strict=True))
    engine = start(streams, weight)
    assert len(engine.scheduler.running) == sum(counts)
    rows: dict[str, int] = {}
    steps = 60
    for _ in range(steps):
        step = run(engine)
        assert len(step.rows) <= max(8, len(streams))
        assert len(step.rows) >= min(sum(counts), 8)
        for row in step.rows:
            rows[row.request.request_id] = rows.get(row.request.request_id, 0) + 1
    for tenant, count in streams.items():
        of = [rows[f"{tenant}{i}"] for i in range(count)]
        assert max(of) - min(of) <= 1, of
        share = 8 * weight[tenant] / sum(weight[name] for name in streams)
        assert sum(of) >= steps * min(count, max(1, int(share))), (tenant, sum(of))
    engine.scheduler.check_integrity()


def test_streams_of_one_tenant_are_all_in_every_step():
    engine = start({"a": 24}, {"a": 1.0})
    assert all(len(run(engine).rows) == 24 for _ in range(10))


def test_without_a_target_and_with_one_in_decode_steps_nobody_is_left_out():
    for changes in ({"itl_target_s": None}, {"itl_decode_steps": 3.0}):
        engine = start({"a": 24, "b": 1}, {"a": 1.0, "b": 1.0}, **changes)
        assert all(len(run(engine).rows) == 25 for _ in range(10)), changes


def test_steps_keep_to_the_target_for_a_while_after_another_tenant_was_there():
    """It may come back, and would wait for the step in flight."""
    engine = start({"a": 24}, {"a": 1.0})
    engine.add(make_request("b", [1, 2], 3, tenant="b"), 1.0)
    while any(request.account == "b" for request in engine.scheduler.requests()):
        run(engine)
    left = engine.now
    while engine.now < left + PRESENT_S - 2 * engine.dt:
        assert len(run(engine).rows) <= 8
    engine.now += 2.5 * engine.dt
    assert all(len(run(engine).rows) == 24 for _ in range(10))


@settings(max_examples=12)
@given(tokens=st.integers(1, 300), streams=st.integers(9, 30), own=st.integers(0, 3))
def test_streams_make_room_for_the_prompt_of_a_tenant_with_fewer(tokens: int, streams: int, own: int):
    """It is computed in as few steps as the chunks of a step that nobody predicts yet, and others go on beside it."""
    engine = start({"a": streams} | ({"b": own} if own else {}), {"a": 1.0, "b": 1.0})
    engine.add(make_request("new", [3] * tokens, 4, tenant="b"), 1.0)
    steps = []
    while not engine.scheduler._core.requests["new"].output:
        steps.append(run(engine))
    assert len(steps) <= 2 + -(-tokens // config().initial_chunk)
    assert all(any(row.request.tenant == "a" for row in step.rows) for step in steps)
    largest = max(config().initial_chunk + 2, 8)
    assert all(step.num_tokens <= largest for step in steps)


@settings(max_examples=12)
@given(
    target=st.floats(1.2, 2.9),
    streams=st.integers(2, 24),
    prompts=st.booleans(),
)
def test_where_one_row_is_too_long_others_are_in_as_many_steps_as_the_target_has_room_for(target, streams, prompts):
    """A step takes 2 ms for the one stream of b, 3 ms with one of a; those without leave time for those with."""
    engine = start({"a": streams, "b": 1}, {"a": 1.0, "b": 1.0}, itl_target_s=target * ROW_S)
    if prompts:
        engine.add(make_request("more", [3] * 40, 4, tenant="a"), 1.0)
    steps = [run(engine) for _ in range(160)]
    assert all(any(row.request.tenant == "b" for row in step.rows) for step in steps)
    of_a = [step for step, plan in enumerate(steps) if any(row.request.tenant == "a" for row in plan.rows)]
    assert all(later - earlier <= SELDOM for earlier, later in zip([-1, *of_a], [*of_a, len(steps)], strict=True))
    assert len(of_a) < len(steps)
    seconds = sum(BASE_S + ROW_S * step.num_tokens for step in steps) / len(steps)
    forced = (2 if target < 2 else target) * ROW_S + (config().min_chunk if prompts else 1) * ROW_S / SELDOM
    assert seconds <= 1.03 * max(target * ROW_S, forced), (seconds, len(of_a))
    if target >= 2.5 and not prompts:
        assert len(of_a) >= len(steps) // 3
    engine.scheduler.check_integrity()


@settings(max_examples=8)
@given(tokens=st.integers(40, 200), streams=st.integers(4, 20))
def test_prompts_of_a_tenant_with_few_streams_do_not_keep_others_prompts_waiting(tokens: int, streams: int):
    """b has one prompt after another, each answered by a token; prompts of a are computed meanwhile."""
    engine = start({"a": streams}, {"a": 1.0, "b": 1.0})
    requests = engine.scheduler._core.requests
    engine.add(make_request("b0", [3] * tokens, 1, tenant="b"), 1.0)
    engine.add(make_request("asked", [5] * 120, 1, tenant="a"), 1.0)
    asked = 0
    for _ in range(400):
        run(engine)
        if "asked" not in requests:
            break
        if f"b{asked}" not in requests:
            asked += 1
            engine.add(make_request(f"b{asked}", [3 + asked % 30] * tokens, 1, tenant="b"), 1.0)
    assert "asked" not in requests, asked


@settings(max_examples=12)
@given(tokens=st.integers(1, 300), streams=st.integers(9, 30), prompts=st.integers(1, 4))
def test_the_prompt_of_a_tenant_with_fewer_goes_before_others_prompts(tokens: int, streams: int, prompts: int):
    """Also when it got more service, since streams of the others leave steps out for it."""
    engine = start({"a": streams, "b": 1}, {"a": 1.0, "b": 1.0})
    engine.scheduler._core.fairness.charge("b", 1e6)
    for i in range(prompts):
        engine.add(make_request(f"more{i}", [3 + i] * 400, 4, tenant="a"), 1.0)
    run(engine)
    new = engine.add(make_request("new", [9] * tokens, 4, tenant="b"), 1.0)
    steps = 0
    while not new.output:
        run(engine)
        steps += 1
    assert steps <= 2 + -(-tokens // config().initial_chunk)


@settings(max_examples=12)
@given(
    answers=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    streams=st.integers(10, 30),
    depth=st.sampled_from([0, 1]),
)
def test_the_step_beside_the_last_token_of_a_tenant_with_few_streams_keeps_the_target(answers, streams, depth):
    """One request after another: nobody knows in that step whether the next will come."""
    engine = start({"a": streams}, {"a": 1.0}, depth, itl_target_s=2.5 * ROW_S)
    for number, count in enumerate(answers):
        asked = engine.add(make_request(f"b{number}", [3], count, tenant="b"), 1.0)
        while not asked.status.terminal:
            step = engine.schedule()
            while len(engine.in_flight) > (depth if step is not None else 0):
                engine.commit()
            assert step is not None and len(step.rows) <= 3
            engine.scheduler.observe(step, BASE_S + ROW_S * step.num_tokens, None)
