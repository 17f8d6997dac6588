"""Service between tenants, order within one, and that everybody is served in the end."""

from __future__ import annotations

import random

import pytest

from scheduler.policy import fairness
from scheduler.policy.fairness import Fairness
from tests.scheduler.harness import FakeEngine, config, make_request


def backlog(engine: FakeEngine, tenant: str, count: int, weight: float = 1.0) -> None:
    """Keep so many requests of the tenant in flight."""
    while sum(r.tenant == tenant for r in engine.scheduler.requests()) < count:
        number = len(engine.submitted)
        engine.add(
            make_request(f"{tenant}{number}", [number % 40, tenant == "a", number % 7] * 3, 4, tenant=tenant), weight
        )


@pytest.mark.parametrize(("weights", "share"), [((1.0, 1.0), 1.0), ((3.0, 1.0), 3.0)])
def test_service_follows_weights_and_not_numbers_of_requests(weights: tuple[float, float], share: float) -> None:
    engine = FakeEngine(config(max_num_batched_tokens=16, num_blocks=64))
    for _ in range(600):
        backlog(engine, "a", 8, weights[0])
        backlog(engine, "b", 40, weights[1])
        engine.step()
    stats = engine.scheduler.stats()
    assert stats["tenant_service/a"] / stats["tenant_service/b"] == pytest.approx(share, rel=0.1)


def test_idling_earns_no_credit() -> None:
    engine = FakeEngine(config(max_num_batched_tokens=16, num_blocks=64))
    engine.add(make_request("b-early", [1], 2, tenant="b"))
    for _ in range(300):
        backlog(engine, "a", 8)
        engine.step()
    before = engine.scheduler.stats()
    for _ in range(300):
        backlog(engine, "a", 8)
        backlog(engine, "b", 8)
        engine.step()
    after = engine.scheduler.stats()
    gained = [after[f"tenant_service/{t}"] - before[f"tenant_service/{t}"] for t in "ab"]
    assert gained[0] == pytest.approx(gained[1], rel=0.15)


def test_a_tenant_that_comes_after_another_has_gone_starts_level_with_it() -> None:
    shares = Fairness()
    shares.arrive("a", 1.0)
    shares.leave("a")
    shares.charge("a", 100.0)  # service goes on after the queue is empty
    shares.end("a")
    shares.arrive("b", 2.0)
    assert shares["b"].counter == 100.0
    shares.charge("b", 10.0)
    assert (shares["b"].counter, shares["b"].service) == (105.0, 10.0)
    shares.arrive("c", 1.0)
    assert shares["c"].counter == 105.0  # level with the one that waits


def test_tenants_without_requests_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "MAX_IDLE_TENANTS", 10)
    shares = Fairness()
    for i in range(1000):
        shares.arrive(f"t{i}", 1.0)
        shares.charge(f"t{i}", 1.0)
        shares.leave(f"t{i}")
        shares.end(f"t{i}")
    assert len(shares.services()) <= 11


def test_cached_and_recomputed_tokens_cost_little_or_nothing() -> None:
    engine = FakeEngine(config(max_num_batched_tokens=64, max_model_len=200))
    prompt = list(range(21))
    engine.add(make_request("a", prompt, 1, tenant="a"))
    engine.drain(5)
    assert engine.scheduler.stats()["tenant_service/a"] == 21
    engine.add(make_request("b", prompt, 1, tenant="a"))
    engine.drain(5)
    assert engine.scheduler.stats()["tenant_service/a"] == pytest.approx(21 + 20 * 0.1 + 1)

    pressed = FakeEngine(config(num_blocks=6, prefix_caching=False))
    for name in ("a", "b"):
        pressed.add(make_request(name, [1] * 4, 16, tenant=name))
    pressed.drain(100)
    assert pressed.scheduler.stats()["preemptions"] > 0
    for name in ("a", "b"):
        assert pressed.scheduler.stats()[f"tenant_service/{name}"] == 4 + 15 * 2


def first_steps(engine: FakeEngine) -> list[str]:
    order: list[str] = []
    while engine.scheduler.has_work():
        plan = engine.step()
        order += [r.request.request_id for r in plan.rows if r.request.request_id not in order]
    return order


def test_priority_then_arrival() -> None:
    engine = FakeEngine(config(max_num_seqs=1))
    for name, priority in (("later", 1), ("first", 0), ("second", 0), ("now", -5)):
        engine.add(make_request(name, [1], 2, priority=priority))
    assert first_steps(engine) == ["now", "first", "second", "later"]


def test_waiting_makes_up_for_priority() -> None:
    engine = FakeEngine(config(max_num_seqs=1, aging_s=1.0))
    engine.add(make_request("low", [1], 2, priority=2))
    engine.now = 1.5
    engine.add(make_request("younger", [1], 2))
    engine.now = 2.5
    engine.add(make_request("too young", [1], 2))
    assert first_steps(engine) == ["younger", "low", "too young"]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_blocks", [12, 64])
def test_a_low_priority_request_ends_under_a_load_that_never_pauses(depth: int, num_blocks: int) -> None:
    """More requests than can run, better in priority, from its own tenant and another, blocks short or not."""
    rng = random.Random(3)
    engine = FakeEngine(config(num_blocks=num_blocks, aging_s=0.5), depth)
    low = engine.add(make_request("low", [1] * 20, 20, priority=3))
    steps = 0
    while low.request_id not in engine.terminal:
        while len(engine.scheduler.requests()) < 12:
            number = len(engine.submitted)
            prompt = [rng.randrange(40) for _ in range(rng.randint(1, 12))]
            engine.add(make_request(f"r{number}", prompt, rng.randint(1, 12), tenant=rng.choice("tu")))
        engine.step()
        steps += 1
        assert steps < 600
    engine.drain(300)
    engine.check_outputs()


@pytest.mark.parametrize("depth", [0, 1])
def test_small_requests_do_not_overtake_a_large_one_for_ever(depth: int) -> None:
    engine = FakeEngine(config(num_blocks=16, max_num_seqs=8), depth)
    for i in range(6):
        engine.add(make_request(f"early{i}", [i] * 4, 8))
    engine.step()
    large = engine.add(make_request("large", list(range(50)), 5))
    steps = 0
    while large.request_id not in engine.terminal:
        while len(engine.scheduler.requests()) < 8:
            engine.add(make_request(f"r{len(engine.submitted)}", [steps % 40] * 4, 8))
        engine.step()
        steps += 1
        assert steps < 200
    engine.drain(100)
    engine.check_outputs()


def test_a_short_prompt_of_another_tenant_does_not_wait_for_a_long_one() -> None:
    engine = FakeEngine(config(num_blocks=300, max_model_len=1200, max_num_batched_tokens=20))
    engine.add(make_request("long", [1] * 1000, 2, tenant="a"))
    for _ in range(5):
        engine.step()
    engine.add(make_request("short", [2] * 10, 2, tenant="b"))
    engine.step()  # both stand level now, and the older one goes first
    plan = engine.step()
    assert {r.request.request_id: r.num_tokens for r in plan.rows} == {"short": 10, "long": 10}
