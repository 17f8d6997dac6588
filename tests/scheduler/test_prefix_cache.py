"""What is shared, with whom, for how long, and what is evicted first."""

from __future__ import annotations

import pytest

from scheduler.errors import IntegrityError
from scheduler.memory.blocks import BlockManager
from scheduler.memory.prefix import PrefixCache
from scheduler.plan import EventKind
from scheduler.request import AdapterKey
from tests.scheduler.harness import FakeEngine, config, make_request

PROMPT = list(range(10, 31))  # 21 tokens: 5 full blocks of 4


def run_one(engine: FakeEngine, request_id: str, prompt: list[int], **options: object):
    request = engine.add(make_request(request_id, prompt, 2, **options))  # type: ignore[arg-type]
    first = None
    while engine.scheduler.request(request_id):
        plan = engine.step()
        if first is None and plan is not None:
            first = plan.rows[0]
    return request, first


@pytest.mark.parametrize("depth", [0, 1])
def test_an_equal_beginning_is_computed_once(depth: int) -> None:
    engine = FakeEngine(config(max_num_batched_tokens=64), depth)
    run_one(engine, "a", PROMPT)
    request, row = run_one(engine, "b", PROMPT)
    assert (row.start, row.num_tokens, request.num_cached) == (20, 1, 20)
    request, row = run_one(engine, "c", [*PROMPT[:10], 1, 2, 3])
    assert (row.start, row.num_tokens, request.num_cached) == (8, 5, 8)
    engine.check_outputs()
    assert engine.scheduler.stats()["prefix_hit_tokens"] == 28


def test_the_cache_can_be_switched_off() -> None:
    engine = FakeEngine(config(prefix_caching=False, max_num_batched_tokens=64))
    run_one(engine, "a", PROMPT)
    assert run_one(engine, "b", PROMPT)[1].start == 0
    assert engine.scheduler.stats()["blocks_cached"] == 0


def test_a_full_hit_recomputes_the_last_token() -> None:
    engine = FakeEngine(config(max_num_batched_tokens=64))
    run_one(engine, "a", PROMPT[:16])
    request, row = run_one(engine, "b", PROMPT[:16])
    assert (row.start, row.num_tokens, row.samples, request.num_cached) == (15, 1, True, 15)
    engine.check_outputs()


def test_a_full_hit_never_writes_a_block_that_another_reads() -> None:
    engine = FakeEngine(config(max_num_batched_tokens=64))
    engine.add(make_request("a", PROMPT[:16], 20))
    engine.step()
    request = engine.add(make_request("b", PROMPT[:16], 2))  # "a" still runs and reads the last block
    plan = engine.step()
    assert [(r.request.request_id, r.start) for r in plan.rows] == [("a", 16), ("b", 12)]
    assert request.num_cached == 12
    engine.drain(40)
    engine.check_outputs()


def test_a_block_that_a_full_hit_writes_again_is_not_found_in_that_step() -> None:
    engine = FakeEngine(config(max_num_batched_tokens=64))
    run_one(engine, "a", PROMPT)
    engine.add(make_request("b", PROMPT[:16], 2))
    engine.add(make_request("c", PROMPT, 2))
    assert [(r.request.request_id, r.start) for r in engine.step().rows] == [("b", 15)]
    assert [(r.request.request_id, r.start) for r in engine.step().rows] == [("b", 16), ("c", 20)]
    engine.drain(10)
    engine.check_outputs()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("max_tokens", "cached"), [(7, 24), (8, 28), (10, 28)])
def test_multi_turn_reuses_prompt_and_answer(depth: int, max_tokens: int, cached: int) -> None:
    engine = FakeEngine(config(max_num_batched_tokens=64), depth)
    first = engine.add(make_request("a", PROMPT, max_tokens))
    engine.drain(20)
    request, _ = run_one(engine, "b", [*PROMPT, *first.output, 1, 2])
    assert request.num_cached == cached  # full blocks of 21 + max_tokens - 1: the last token's KV was never computed
    engine.check_outputs()


def test_tenants_adapters_and_salts_never_share() -> None:
    engine = FakeEngine(config(max_num_batched_tokens=64))
    owners = [
        {"tenant": tenant, "cache_salt": salt, "adapter": AdapterKey(uid, version)}
        for tenant, salt in (("a", ""), ("b", ""), ("1.1.a", ""), ("a", "b"), ("a", "c"), ("a', 'b", ""))
        for uid, version in ((0, 0), (1, 1), (1, 2), (2, 1))
    ]
    for i, owner in enumerate(owners):
        assert run_one(engine, f"r{i}", PROMPT[:9], **owner)[0].num_cached == 0
        assert run_one(engine, f"again{i}", PROMPT[:9], **owner)[0].num_cached == 8
    engine.check_outputs()


def test_tenants_of_one_group_share_and_no_name_is_a_group() -> None:
    engine = FakeEngine(config(max_num_batched_tokens=64))

    def hits(name: str, tenant: str, group: str | None, salt: str = "") -> bool:
        request = make_request(name, PROMPT, 2, tenant=tenant, cache_salt=salt)
        request.cache_group = group
        engine.add(request)
        while engine.scheduler.request(name):
            engine.step()
        return request.num_cached > 0

    assert not hits("r0", "a", "g") and hits("r1", "b", "g"), "another tenant of the group"
    for number, (tenant, group, salt) in enumerate(
        [
            ("a", None, ""),
            ("g", None, ""),
            ("group g", None, ""),
            ("a", "tenant a", ""),
            ("a", "g", "s"),
            ("b", "h", ""),
        ]
    ):
        assert not hits(f"s{number}", tenant, group, salt), (tenant, group, salt)


def test_prompt_log_probabilities_compute_the_whole_prompt() -> None:
    engine = FakeEngine(config(max_num_batched_tokens=64))
    run_one(engine, "a", PROMPT)
    request, row = run_one(engine, "b", PROMPT, prompt_logprobs=0)
    assert (row.start, row.num_tokens, request.num_cached) == (0, 21, 0)


@pytest.mark.parametrize("depth", [0, 1])
def test_equal_prompts_that_arrive_together_are_computed_once(depth: int) -> None:
    engine = FakeEngine(config(max_num_batched_tokens=64, max_num_seqs=5), depth)
    for i in range(4):
        engine.add(make_request(f"r{i}", PROMPT, 5))
    engine.add(make_request("other", [1, 2, 3], 5))  # need not wait for them
    plan = engine.step()
    assert [(r.request.request_id, r.num_tokens) for r in plan.rows] == [("r0", 21), ("other", 3)]
    plan = engine.step()
    assert [(r.request.request_id, r.start, r.num_tokens) for r in plan.rows if not r.is_decode] == [
        (f"r{i}", 20, 1) for i in (1, 2, 3)
    ]
    engine.drain(20)
    engine.check_outputs()


def test_equal_hashes_of_unequal_tokens_are_no_hit() -> None:
    cache = PrefixCache(4, hash=lambda data: b"same")
    one, two = make_request("a", [1] * 8), make_request("b", [2] * 8)
    assert cache.insert(0, cache.content(one, 0))
    assert cache.find(cache.content(one, 0)) == 0
    assert cache.find(cache.content(two, 0)) is None
    assert cache.find(cache.content(make_request("c", [1] * 4, tenant="u"), 0)) is None
    assert not cache.insert(1, cache.content(two, 0))  # the first one stays
    assert cache.find(cache.content(one, 0)) == 0 and 1 not in cache


def fill(blocks: BlockManager, request, num_tokens: int) -> None:
    blocks.take(request, blocks.match(request))
    assert blocks.grow(request, num_tokens)
    request.num_computed = num_tokens
    blocks.publish(request)


def test_free_blocks_are_given_away_useless_first_then_oldest_then_tail_first() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4, prefix_caching=True)
    old, new, scratch = make_request("a", [1] * 8), make_request("b", [2] * 8), make_request("c", [3] * 3)
    for request in (old, new, scratch):
        fill(blocks, request, len(request.prompt))
    for request in (old, new, scratch):
        blocks.release(request.blocks)
    taker = make_request("d", [4] * 32)
    blocks.grow(taker, 32)
    assert list(taker.blocks) == [scratch.blocks[0], 5, 6, 7, *reversed(old.blocks), *reversed(new.blocks)]
    assert len(blocks.cache) == 0 and blocks.num_free == 0
    assert blocks.problems([taker.blocks]) == []


def test_what_is_found_again_becomes_the_youngest() -> None:
    blocks = BlockManager(num_blocks=2, block_size=4, prefix_caching=True)
    one, two = make_request("a", [1] * 4), make_request("b", [2] * 4)
    for request in (one, two):
        fill(blocks, request, 4)
    for request in (one, two):
        blocks.release(request.blocks)
    again = make_request("c", [1] * 5)
    blocks.take(again, blocks.match(again))
    assert again.blocks == one.blocks
    blocks.release(again.blocks)
    taker = make_request("d", [3] * 4)
    blocks.grow(taker, 4)
    assert taker.blocks == two.blocks


def test_blocks_released_too_often_are_noticed() -> None:
    blocks = BlockManager(num_blocks=2, block_size=4, prefix_caching=True)
    with pytest.raises(IntegrityError, match="released more often"):
        blocks.release([0])


def test_a_failed_step_takes_back_what_was_shared_from_it() -> None:
    engine = FakeEngine(config(max_num_batched_tokens=64), depth=1)
    engine.add(make_request("writer", PROMPT, 5))
    engine.step()
    engine.add(make_request("reader", PROMPT, 5))
    engine.add(make_request("other", [1, 2, 3], 5))
    plan = engine.scheduler.schedule(engine.now)
    assert [(r.request.request_id, r.start) for r in plan.rows] == [("writer", 21), ("reader", 20), ("other", 0)]
    engine.launch(plan)
    engine.drop(0)  # the writer's prefill never happened, the reader built on it
    assert list(engine.terminal) == ["writer"] and engine.terminal["writer"].kind is EventKind.FAILED
    engine.check()
    reader = engine.scheduler.request("reader")
    assert reader is not None and reader.num_preemptions == 1 and reader.num_in_flight == 0
    engine.commit()
    assert reader.output == []
    engine.drain(30)
    engine.check_outputs()
    assert engine.terminal["reader"].kind is engine.terminal["other"].kind is EventKind.FINISHED


def test_what_is_cached_goes_before_what_would_push_it_out() -> None:
    """Eight blocks, five of them cached: the first in the queue would take these, the last uses them."""
    order = {}
    for name, waited_s in (("close behind", 0.0), ("too late", 15.0)):
        engine = FakeEngine(config(num_blocks=8, max_num_seqs=1, max_num_batched_tokens=64))
        run_one(engine, "before", PROMPT)
        engine.add(make_request("running", [1, 2, 3], 3))
        engine.step()
        first = engine.add(make_request("first", list(range(40, 65)), 1))
        engine.add(make_request("lower", [*PROMPT, 9], 1, priority=1))
        again = engine.add(make_request("again", [*PROMPT, 1], 1))
        engine.now += waited_s
        engine.drain(30)
        engine.check_outputs()
        order[name] = [each for each in engine.terminal if each in ("first", "again", "lower")], again.num_cached
        assert first.num_cached == 0
    assert order["close behind"] == (["again", "first", "lower"], 20)
    assert order["too late"] == (["first", "again", "lower"], 0)


def test_with_room_for_all_the_first_comes_first() -> None:
    engine = FakeEngine(config(max_num_seqs=1, max_num_batched_tokens=64))
    run_one(engine, "before", PROMPT)
    engine.add(make_request("first", [1, 2, 3], 1))
    engine.add(make_request("again", PROMPT, 1))
    engine.drain(10)
    assert list(engine.terminal) == ["before", "first", "again"]


@pytest.mark.parametrize("drop", [False, True])
def test_the_blocks_of_an_aborted_request_are_good_only_if_its_step_was(drop: bool) -> None:
    engine = FakeEngine(config(max_num_batched_tokens=64), depth=1)
    engine.add(make_request("writer", PROMPT, 5))
    engine.step()
    engine.take(engine.scheduler.abort("writer", "client"))
    reader = engine.add(make_request("reader", PROMPT, 5))
    engine.launch(engine.scheduler.schedule(engine.now))
    assert reader.num_cached == 20 and len(engine.in_flight) == 2
    if drop:
        engine.drop(0)
    else:
        engine.commit()
    engine.drain(30)
    engine.check_outputs()
    assert reader.num_preemptions == drop and engine.terminal["reader"].kind is EventKind.FINISHED
