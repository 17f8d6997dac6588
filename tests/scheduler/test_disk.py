"""Which blocks go to disk, who gets them back, who waits for them, and for how long."""

from __future__ import annotations

import pytest

from scheduler.plan import Drop, EventKind, Fetch, Save
from scheduler.request import AdapterKey, Request
from tests.scheduler.harness import FakeDisk, FakeEngine, config, make_request

PROMPT = list(range(10, 31))  # 21 tokens: 5 full blocks of 4
OTHER = list(range(40, 65))


def engine_with(disk: FakeDisk, depth: int = 0, **changes: object) -> FakeEngine:
    values = {"max_num_batched_tokens": 64, "num_blocks": 8, "disk_bytes": 100, "disk_block_bytes": 1, **changes}
    return FakeEngine(config(**values), depth, disk=disk)


def ask(engine: FakeEngine, request_id: str, prompt: list[int], max_tokens: int = 2, **options: object) -> Request:
    request = engine.add(make_request(request_id, prompt, max_tokens, **{"kv_digest": b"m", **options}))
    engine.drain(100)
    engine.check_outputs()
    return request


@pytest.mark.parametrize("depth", [0, 1])
def test_what_memory_has_given_away_comes_back(depth: int) -> None:
    engine = engine_with(FakeDisk(), depth)
    ask(engine, "a", PROMPT)
    ask(engine, "b", OTHER)  # takes seven of the eight blocks
    again = ask(engine, "c", PROMPT)
    assert again.num_cached == 20
    assert engine.scheduler.stats()["disk_hit_tokens"] > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_the_next_process_finds_it(depth: int) -> None:
    disk = FakeDisk()
    first = ask(engine_with(disk, depth), "a", PROMPT, 8)
    engine = engine_with(disk.crash(), depth)
    again = ask(engine, "b", [*PROMPT, *first.output, 1, 2])
    assert again.num_cached == 28, "prompt and answer, in full blocks"
    assert engine.scheduler.stats()["disk_hit_tokens"] == 28


def test_of_a_full_hit_the_last_token_is_computed() -> None:
    disk = FakeDisk()
    ask(engine_with(disk), "a", PROMPT[:16])
    assert ask(engine_with(disk.crash()), "b", PROMPT[:16]).num_cached == 15


def test_nobody_else_finds_it() -> None:
    disk = FakeDisk()
    owner = {"tenant": "a", "cache_salt": "s", "kv_digest": b"model and adapter"}
    ask(engine_with(disk), "a", PROMPT, **owner)
    assert disk.kept
    strangers = [{"tenant": "b"}, {"cache_salt": ""}, {"cache_salt": "t"}, {"kv_digest": b"another"}]
    strangers += [{"kv_digest": b""}, {"tenant": "a', 's"}, {"tenant": "", "cache_salt": "as"}]
    for i, changes in enumerate(strangers):
        assert ask(engine_with(disk.crash()), f"r{i}", PROMPT, **{**owner, **changes}).num_cached == 0
    grouped = make_request("g", PROMPT, **owner)
    grouped.cache_group = "a"
    engine = engine_with(disk.crash())
    engine.add(grouped)
    engine.drain(50)
    assert grouped.num_cached == 0
    assert ask(engine_with(disk.crash()), "again", PROMPT, **owner).num_cached == 20


def test_an_adapter_is_what_it_computes_not_its_number() -> None:
    """Every process numbers adapters itself. (The fake KV depends on them, so outputs are not looked at.)"""
    disk = FakeDisk()
    hits = []
    for name, uid, digest in (("first", 1, b"x"), ("other", 1, b"y"), ("renumbered", 2, b"x")):
        engine = engine_with(disk.crash())
        request = engine.add(make_request(name, PROMPT, adapter=AdapterKey(uid, 1), kv_digest=digest))
        engine.drain(50)
        engine.settle_disk()
        hits.append(request.num_cached)
    assert hits == [0, 0, 20]


def test_equal_prompts_wait_for_one_read_and_others_go_on() -> None:
    disk = FakeDisk()
    ask(engine_with(disk), "a", PROMPT)
    engine = engine_with(disk.crash(), num_blocks=40)
    disk.stalls = True
    for i in range(3):
        engine.add(make_request(f"r{i}", PROMPT, 3, kv_digest=b"m"))
    other = engine.add(make_request("other", [1, 2, 3], 5, kv_digest=b"m"))
    for _ in range(6):
        plan = engine.step()
        assert plan is None or [row.request for row in plan.rows] == [other]
    assert engine.terminal["other"].kind is EventKind.FINISHED
    assert sum(isinstance(order, Fetch) for order in disk.reads) == 1
    assert engine.scheduler.stats()["disk_waiting"] == 3
    disk.stalls = False
    engine.drain(50)
    engine.check_outputs()
    assert all(engine.submitted[f"r{i}"].num_cached == 20 for i in range(3))
    assert engine.scheduler.stats()["disk_hit_tokens"] == 20


def test_whoever_leaves_while_it_is_read_leaves_no_blocks_behind() -> None:
    disk = FakeDisk()
    ask(engine_with(disk), "a", PROMPT)
    engine = engine_with(disk.crash())
    disk.stalls = True
    engine.add(make_request("leaves", PROMPT, 3, kv_digest=b"m"))
    assert engine.step() is None and engine.scheduler.stats()["blocks_used"] == 5
    engine.take(engine.scheduler.abort("leaves", "client"))
    engine.check()
    assert not engine.scheduler.has_work()
    engine.check_outputs()  # no block is in use
    stalled = ask(engine, "comes", PROMPT)
    assert stalled.num_cached == 20, "it was read nevertheless"


def test_nobody_waits_longer_than_computing_takes() -> None:
    disk = FakeDisk()
    ask(engine_with(disk), "a", PROMPT)
    engine = engine_with(disk.crash(), num_blocks=40)
    engine.add(make_request("measured", OTHER, 1))
    plan = engine.step()
    assert plan is not None
    engine.scheduler.observe(plan, 0.01 * plan.num_tokens, None)  # 20 tokens take 0.2 s, a step of the clock 0.01 s
    disk.stalls = True
    late = engine.add(make_request("late", PROMPT, 2, kv_digest=b"m"))
    waited = 0
    while engine.step() is None:
        waited += 1
    assert 19 <= waited <= 21 and late.num_cached == 0
    engine.drain(10)
    engine.check_outputs()  # the read has ended meanwhile: its blocks are there already
    assert ask(engine, "next", PROMPT).num_cached == 20


def test_the_least_recently_used_gives_way() -> None:
    disk = FakeDisk()
    engine = engine_with(disk, num_blocks=40, disk_bytes=8)
    ask(engine, "a", PROMPT)
    first = set(disk.kept)
    ask(engine, "b", [1] * 8)
    assert len(disk.kept) == 7
    ask(engine, "c", PROMPT)  # found in memory, which counts as a use of what is on disk
    ask(engine, "d", [2] * 12)
    assert len(disk.kept) == 8 and first <= set(disk.kept)
    assert engine.scheduler.stats()["disk_evictions"] == 2
    assert engine.scheduler.stats()["disk_bytes"] == 8


def test_a_smaller_size_than_before_deletes_at_start() -> None:
    disk = FakeDisk()
    ask(engine_with(disk), "a", PROMPT)
    engine = engine_with(disk.crash(), disk_bytes=2)
    engine.settle_disk()
    assert len(disk.kept) == 2


def test_when_the_disk_is_full_requests_go_on() -> None:
    disk = FakeDisk()
    engine = engine_with(disk)
    disk.full = True
    ask(engine, "a", PROMPT)
    ask(engine, "b", OTHER)
    disk.full = False
    ask(engine, "c", [1] * 12)
    assert not disk.kept and engine.scheduler.stats()["disk_bytes"] == 0
    assert not engine.scheduler.disk.busy


def test_what_is_damaged_is_computed_again_and_written_again() -> None:
    disk = FakeDisk()
    ask(engine_with(disk), "a", PROMPT)
    keys = list(disk.kept)
    engine = engine_with(disk.crash(), num_blocks=40)
    del disk.kept[keys[2]]  # after the folder was read
    assert ask(engine, "b", PROMPT).num_cached == 8, "as far as the first gap"
    assert engine.scheduler.stats()["disk_damaged_blocks"] == 1
    assert set(engine.disk.kept) == set(keys)
    assert ask(engine, "c", PROMPT).num_cached == 20


def test_what_a_spoiled_request_computed_is_not_kept() -> None:
    disk = FakeDisk()
    engine = engine_with(disk)
    engine.add(make_request("bad", PROMPT, 8, kv_digest=b"m"))
    for _ in range(3):
        engine.step()
    assert disk.kept or disk.writer
    engine.take(engine.scheduler.fail("bad", "not finite", spoiled=True))
    engine.check_outputs()
    assert not disk.kept and engine.scheduler.stats()["blocks_cached"] == 0
    assert ask(engine, "again", PROMPT).num_cached == 0


def test_orders_of_a_block_that_is_not_computed_yet_never_come() -> None:
    engine = engine_with(FakeDisk(), depth=1)
    engine.add(make_request("a", PROMPT, 5, kv_digest=b"m"))
    engine.schedule()
    assert not engine.disk.writer, "its step is in flight"
    engine.drop(0)
    assert engine.scheduler.disk.orders() == []


def test_without_a_disk_nothing_is_ordered() -> None:
    engine = FakeEngine(config())
    ask(engine, "a", PROMPT)
    assert engine.scheduler.disk is None and "disk_bytes" not in engine.scheduler.stats()
    with pytest.raises(ValueError, match="disk_bytes is 3, must hold a block"):
        config(disk_bytes=3, disk_block_bytes=4)


def test_orders_name_what_they_move() -> None:
    disk = FakeDisk()
    engine = engine_with(disk, disk_bytes=1)
    disk.stalls = True
    engine.add(make_request("a", [1] * 9, 1, kv_digest=b"m"))
    engine.step()
    engine.step()
    ((save, _),) = disk.writer
    assert isinstance(save, Save) and len(save.key) == 32
    disk.stalls = False
    engine.settle_disk()
    assert not any(isinstance(order, Drop) for order, _ in disk.writer) and len(disk.kept) == 1
    with pytest.raises(KeyError):
        engine.scheduler.disk.saved(save.key, True)
