"""Of which beginnings states are kept, who finds them, and what is given away first."""

from __future__ import annotations

import pytest

from scheduler.request import AdapterKey
from tests.scheduler.harness import FakeEngine, config, make_request
from tests.scheduler.test_prefix_cache import PROMPT, run_one

LONG = [*PROMPT, *range(31, 46)]  # 36 tokens


def make(depth: int = 0, **changes: object) -> FakeEngine:
    values: dict[str, object] = {"num_states": 4, "num_snapshots": 8, "max_num_batched_tokens": 64}
    return FakeEngine(config(**(values | changes)), depth)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("max_tokens", "cached"), [(3, 12), (4, 24), (7, 24), (8, 28), (10, 28)])
def test_a_second_turn_begins_behind_the_answer(depth: int, max_tokens: int, cached: int) -> None:
    """21 tokens of prompt: behind its closing 8 at first, then behind the last full block of what was computed."""
    engine = make(depth)
    first = engine.add(make_request("a", PROMPT, max_tokens))
    engine.drain(20)
    request, row = run_one(engine, "b", [*PROMPT, *first.output, 1, 2])
    assert request.num_cached == row.start == cached
    engine.check_outputs()


def test_a_second_turn_that_repeats_no_answer_begins_behind_the_last_message() -> None:
    """Templates drop what was thought: the answer comes back in other tokens."""
    engine = make()
    run_one(engine, "a", LONG)
    assert run_one(engine, "b", [*LONG[:28], 1, 2, 3, 4, 5])[0].num_cached == 28
    engine.check_outputs()


@pytest.mark.parametrize("budget", [5, 64])
def test_where_two_prompts_part_the_third_begins(budget: int) -> None:
    engine = make(max_num_batched_tokens=budget)
    tails = [[n] * 20 for n in (1, 2, 3)]
    assert [run_one(engine, f"r{n}", PROMPT + tail)[0].num_cached for n, tail in enumerate(tails)] == [0, 0, 20]
    engine.check_outputs()


def test_a_full_block_of_no_snapshot_is_no_hit() -> None:
    engine = make(num_snapshots=0)
    run_one(engine, "a", LONG)
    assert run_one(engine, "b", LONG)[0].num_cached == 0
    assert engine.scheduler.stats()["blocks_cached"] > 0


def test_nothing_is_kept_where_the_cache_is_off() -> None:
    engine = make(prefix_caching=False)
    run_one(engine, "a", LONG)
    stats = engine.scheduler.stats()
    assert stats["snapshots_total"] == stats["snapshots_saved"] == 0


def test_tenants_adapters_and_salts_never_share() -> None:
    engine = make(num_snapshots=100, num_blocks=400)
    owners = [
        {"tenant": tenant, "cache_salt": salt, "adapter": AdapterKey(uid, version)}
        for tenant, salt in (("a", ""), ("b", ""), ("a", "b"), ("a", "c"), ("a', 'b", ""))
        for uid, version in ((0, 0), (1, 1), (1, 2), (2, 1))
    ]
    for i, owner in enumerate(owners):
        assert run_one(engine, f"r{i}", LONG, **owner)[0].num_cached == 0
        assert run_one(engine, f"again{i}", LONG, **owner)[0].num_cached == 28
    engine.check_outputs()


def test_the_least_recently_used_is_given_away() -> None:
    engine = make(num_snapshots=2)
    prompts = {name: [number] * 30 for number, name in enumerate("abc", 1)}
    for name in "ab":
        run_one(engine, name, prompts[name])
    assert run_one(engine, "a again", prompts["a"])[0].num_cached == 20
    run_one(engine, "c", prompts["c"])  # instead of b's
    assert run_one(engine, "a once more", prompts["a"])[0].num_cached == 20
    assert run_one(engine, "b again", prompts["b"])[0].num_cached == 0
    engine.check_outputs()


def test_an_answer_keeps_its_newest_alone() -> None:
    engine = make()
    engine.add(make_request("a", PROMPT, 30))
    engine.drain(40)
    stats = engine.scheduler.stats()
    assert stats["snapshots_findable"] == 2 < stats["snapshots_saved"]


def test_a_snapshot_goes_with_its_block() -> None:
    engine = make(num_blocks=12)
    run_one(engine, "a", LONG)
    run_one(engine, "b", list(range(60, 100)))
    assert run_one(engine, "c", LONG)[0].num_cached == 0
    engine.check_outputs()


@pytest.mark.parametrize("depth", [0, 1])
def test_equal_prompts_that_arrive_together_are_computed_once(depth: int) -> None:
    engine = make(depth)
    for i in range(3):
        engine.add(make_request(f"r{i}", LONG, 3))
    assert [(r.request.request_id, r.num_tokens) for r in engine.step().rows] == [("r0", 36)]
    rows = [(r.request.request_id, r.start) for r in engine.step().rows if not r.is_decode]
    assert rows == [("r1", 28), ("r2", 28)]
    engine.drain(20)
    engine.check_outputs()


def test_no_more_run_than_there_are_states() -> None:
    engine = make(num_states=2)
    for i in range(4):
        engine.add(make_request(f"r{i}", [i] * 5, 3))
    assert len(engine.step().rows) == 2
    engine.drain(40)
    engine.check_outputs()
