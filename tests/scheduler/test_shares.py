"""Seats, blocks and the queue are shared by weight: a flood of one tenant does not keep another waiting."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.plan import AdmissionError, EventKind
from scheduler.request import Status
from tests.scheduler.harness import FakeEngine, config, make_request


def flood(engine: FakeEngine, tenant: str, count: int, weight: float = 1.0, max_tokens: int = 40) -> None:
    for _ in range(count):
        number = len(engine.submitted)
        engine.add(make_request(f"{tenant}{number}", [number % 40, number % 7], max_tokens, tenant=tenant), weight)


def steps_to_first_token(engine: FakeEngine, request_id: str, limit: int = 200) -> int:
    for count in range(limit):
        if engine.streamed[request_id]:
            return count
        engine.step()
    raise AssertionError(f"no token after {limit} steps: {engine.scheduler.stats()}")


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(
    depth=st.sampled_from([0, 1]),
    flooders=st.lists(st.sampled_from([0.1, 1.0, 7.0, 1000.0]), min_size=1, max_size=2),
    weight=st.sampled_from([0.1, 1.0, 7.0]),
    before=st.integers(0, 30),
    length=st.integers(1, 30),
    num_blocks=st.sampled_from([45, 200]),
)
def test_the_first_token_comes_within_three_steps_and_its_own_prefill(
    depth, flooders, weight, before, length, num_blocks
) -> None:
    engine = FakeEngine(config(num_blocks=num_blocks, max_num_seqs=6, max_num_batched_tokens=16), depth)
    for i, each in enumerate(flooders):
        flood(engine, f"a{i}", 30, each)
    for _ in range(before):
        engine.step()
    engine.add(make_request("b", [41] * length, 3, tenant="b"), weight)
    own = -(-length // (16 - 6))  # a step has 16 tokens, of which the others' decode rows take at most 6
    assert steps_to_first_token(engine, "b") <= 3 + own + depth
    engine.drain(3000)
    engine.check_outputs()
    assert all(event.kind is EventKind.FINISHED for event in engine.terminal.values())


def test_seats_follow_weights_and_stay_where_they_are() -> None:
    engine = FakeEngine(config(num_blocks=400, max_num_seqs=12, max_num_batched_tokens=64, max_model_len=300))
    flood(engine, "a", 20, 1.0, 200)
    for _ in range(5):
        engine.step()
    assert _running_slots(engine) == {"a": 12}  # alone it has all of them
    flood(engine, "b", 20, 2.0, 200)
    for _ in range(40):
        engine.step()
    assert _running_slots(engine) == {"a": 4, "b": 8}
    moved = engine.scheduler.stats()["preemptions"]
    for _ in range(60):
        engine.step()
    assert engine.scheduler.stats()["preemptions"] == moved == 8


def _running_slots(engine: FakeEngine) -> dict[str, int]:
    found: dict[str, int] = {}
    for request in engine.scheduler.requests():
        if request.status is Status.RUNNING:
            found[request.tenant] = found.get(request.tenant, 0) + 1
    return found


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32), depth=st.sampled_from([0, 1]))
def test_no_seat_stays_empty_while_somebody_waits_and_nothing_is_lost(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    engine = FakeEngine(config(num_blocks=300, max_num_seqs=5, max_num_batched_tokens=40, max_queue=1000), depth)
    for _ in range(60):
        for _ in range(rng.choice([0, 0, 1, 4])):
            number = len(engine.submitted)
            prompt = [10 + number % 40, *(rng.randrange(40) for _ in range(rng.randint(0, 5)))]
            tenant = rng.choice("aaabc")
            engine.add(make_request(f"r{number}", prompt, rng.randint(1, 30), tenant=tenant), ord(tenant) - 96.0)
        plan = engine.schedule()
        requests = engine.scheduler.requests()
        waiting = [r for r in requests if r.status is Status.WAITING]
        if plan is not None and waiting and plan.num_tokens < 40 - 6:  # the prompts have at most 6 tokens
            assert sum(r.status is Status.RUNNING for r in requests) == 5
        while len(engine.in_flight) > (depth if plan is not None else 0):
            engine.commit()
    engine.drain(2000)
    engine.check_outputs()
    assert all(event.kind is EventKind.FINISHED for event in engine.terminal.values())


# ---- the queue


@pytest.mark.parametrize(("weight", "share"), [(1.0, 10), (3.0, 15), (0.25, 4)])
def test_a_flood_leaves_others_their_share_of_the_queue(weight: float, share: int) -> None:
    engine = FakeEngine(config(max_queue=20))
    flood(engine, "a", 20)
    with pytest.raises(AdmissionError) as refused:
        flood(engine, "a", 1)
    assert refused.value.code == "queue_full" and refused.value.retry_after_s
    flood(engine, "b", share, weight)
    with pytest.raises(AdmissionError, match="20 requests are waiting, the limit is 20"):
        flood(engine, "b", 1, weight)
    assert engine.scheduler.stats()["waiting"] == 20
    gone = [key for key, event in engine.terminal.items() if event.kind is EventKind.REFUSED]
    assert gone == [f"a{i}" for i in range(19, 19 - share, -1)]  # the newest first
    assert all(engine.terminal[key].retry_after_s for key in gone)
    engine.drain(2000)
    engine.check_outputs()


def test_what_ran_before_is_never_refused_for_another() -> None:
    engine = FakeEngine(config(max_queue=3, max_num_seqs=4, num_blocks=64))
    for _ in range(4):
        flood(engine, "a", 1)
        engine.step()
    flood(engine, "a", 1)
    for request in [r for r in engine.scheduler.requests() if r.status is Status.RUNNING][:2]:
        engine.scheduler._core.preempt(request)
    flood(engine, "b", 1)
    with pytest.raises(AdmissionError, match="3 requests are waiting"):
        flood(engine, "b", 1)
    assert [event.kind for event in engine.terminal.values()] == [EventKind.REFUSED]
    engine.drain(500)
    engine.check_outputs()


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(arrivals=st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=120))
def test_within_its_share_of_the_queue_nobody_is_refused(arrivals) -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 0.5}
    engine = FakeEngine(config(max_queue=8, max_num_seqs=1, max_num_batched_tokens=4))
    for tenant, step in arrivals:
        if step:
            engine.step()
        waiting = [r.tenant for r in engine.scheduler.requests() if r.status is not Status.RUNNING]
        mine = waiting.count(tenant) + 1
        share = 8 * weights[tenant] / sum(weights[name] for name in {*waiting, tenant})
        try:
            flood(engine, tenant, 1, weights[tenant], max_tokens=3)
        except AdmissionError:
            assert mine > 1 and mine + 1 > int(share)
        assert engine.scheduler.stats()["waiting"] <= 8
    engine.drain(1000)
    engine.check_outputs()
