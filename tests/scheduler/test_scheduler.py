"""Single behaviours of the scheduler's face."""

from __future__ import annotations

import pytest

from scheduler.errors import IntegrityError
from scheduler.plan import EventKind
from scheduler.policy.waiting import WaitingQueue
from scheduler.request import AdapterKey, Status
from scheduler.scheduler import Scheduler
from tests.scheduler.harness import FakeEngine, config, expected_tokens, make_request


def rows(plan):
    return [(r.request.request_id, r.start, r.num_tokens, r.samples) for r in plan.rows]


# ---- steps


def test_prompts_are_chunked_into_what_decode_rows_leave() -> None:
    engine = FakeEngine(config(max_num_batched_tokens=8, max_num_seqs=4))
    engine.add(make_request("a", [1, 2, 3], 10))
    assert rows(engine.step()) == [("a", 0, 3, True)]
    engine.add(make_request("b", [5] * 12, 10))
    assert rows(engine.step()) == [("a", 3, 1, True), ("b", 0, 7, False)]
    assert rows(engine.step()) == [("a", 4, 1, True), ("b", 7, 5, True)]
    assert rows(engine.step()) == [("a", 5, 1, True), ("b", 12, 1, True)]
    engine.drain(20)
    engine.check_outputs()


def test_a_decode_row_is_planned_before_its_token_is_known() -> None:
    scheduler = Scheduler(config(prefix_caching=False))
    request = make_request("a", [1, 2], 3)
    scheduler.add(request, 0.0)
    first = scheduler.schedule(0.0)
    second = scheduler.schedule(0.0)
    assert rows(second) == [("a", 2, 1, True)]
    assert request.num_in_flight == 2 and request.token(2) is None
    with pytest.raises(IntegrityError, match="in flight"):
        scheduler.schedule(0.0)
    with pytest.raises(IntegrityError, match="oldest"):
        scheduler.commit(second, [[9]], 0.0)
    scheduler.commit(first, [[8]], 0.0)
    assert request.token(2) == 8 and request.num_in_flight == 1
    third = scheduler.schedule(0.0)
    assert scheduler.commit(second, [[9]], 0.0)[0].tokens == [9]
    # the third token is the last: nothing more is planned although it is not known yet
    assert scheduler.schedule(0.0) is None
    (event,) = scheduler.commit(third, [[10]], 0.0)
    assert (event.kind, event.reason, event.tokens) == (EventKind.FINISHED, "length", [10])
    assert request.output == [8, 9, 10] and not scheduler.has_work()


def test_a_step_ahead_of_an_end_is_ignored_and_keeps_its_blocks() -> None:
    scheduler = Scheduler(config(eos_token_ids=(7,), prefix_caching=False))
    scheduler.add(make_request("a", [1, 2], 9, ignore_eos=False), 0.0)
    first = scheduler.schedule(0.0)
    second = scheduler.schedule(0.0)
    (event,) = scheduler.commit(first, [[7]], 0.0)
    assert (event.kind, event.reason, event.tokens, event.stop_token) == (EventKind.FINISHED, "stop", [], 7)
    assert event.request.output == [] and event.request.stop_reason == "stop"
    assert scheduler.stats()["blocks_used"] == 1 and scheduler.has_work()
    assert scheduler.commit(second, [[5]], 0.0) == []
    assert scheduler.stats()["blocks_used"] == 0 and not scheduler.has_work()
    assert event.request.output == []


@pytest.mark.parametrize("depth", [0, 1])
def test_stop_tokens(depth: int) -> None:
    settings = config(eos_token_ids=())
    reference = expected_tokens(make_request("a", [1, 2], 10), settings)[0]
    stop = next(t for i, t in enumerate(reference) if i and t not in reference[:i])
    engine = FakeEngine(config(eos_token_ids=(stop,)), depth)
    engine.add(make_request("eos", [1, 2], 10, ignore_eos=False))
    engine.add(make_request("ignored", [1, 2], 10, ignore_eos=True))
    engine.add(make_request("stop", [1, 2], 10, ignore_eos=True, stop_token_ids=(stop,)))
    engine.drain(30)
    for name in ("eos", "stop"):
        assert engine.streamed[name] == reference[: reference.index(stop)]
        assert engine.terminal[name].stop_token == stop
    assert engine.streamed["ignored"] == reference
    assert engine.terminal["ignored"].stop_token is None and engine.terminal["ignored"].reason == "length"


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("num_blocks", "max_model_len", "total"), [(32, 11, 11), (3, 64, 12)])
def test_output_ends_at_the_length_limit(depth: int, num_blocks: int, max_model_len: int, total: int) -> None:
    engine = FakeEngine(config(num_blocks=num_blocks, max_model_len=max_model_len), depth)
    engine.add(make_request("a", [1, 2, 3], 100))
    engine.drain(30)
    assert len(engine.streamed["a"]) == total - 3
    assert engine.terminal["a"].reason == "length"


@pytest.mark.parametrize("depth", [0, 1])
def test_no_output_asked_for(depth: int) -> None:
    engine = FakeEngine(config(max_num_batched_tokens=4), depth)
    engine.add(make_request("a", [1] * 10, 0))
    plans = [engine.step() for _ in range(3)]
    assert [r.num_tokens for p in plans for r in p.rows] == [4, 4, 2]
    assert not any(r.samples for p in plans for r in p.rows)
    engine.drain(3)
    assert engine.terminal["a"].reason == "length" and engine.streamed["a"] == []


def test_tokens_that_do_not_match_the_plan_are_refused_and_change_nothing() -> None:
    scheduler = Scheduler(config())
    request = make_request("a", [1, 2], 3)
    scheduler.add(request, 0.0)
    plan = scheduler.schedule(0.0)
    for wrong in ([], [[]], [[1, 2]], [[1], [2]]):
        with pytest.raises(IntegrityError):
            scheduler.commit(plan, wrong, 0.0)
    scheduler.commit(plan, [[4]], 0.0)
    assert request.output == [4]
    with pytest.raises(IntegrityError):
        scheduler.commit(plan, [[4]], 0.0)
    with pytest.raises(IntegrityError):
        scheduler.drop(plan)


# ---- ends


@pytest.mark.parametrize("depth", [0, 1])
def test_a_cancelled_request_leaves_at_once_and_its_blocks_within_two_steps(depth: int) -> None:
    engine = FakeEngine(config(), depth)
    engine.add(make_request("a", [1] * 9, 50))
    engine.add(make_request("b", [2] * 9, 50))
    for _ in range(5):
        engine.step()
    held = engine.scheduler.request("b")
    assert held is not None
    engine.take(engine.scheduler.abort("a", "client"))
    assert engine.terminal["a"].kind is EventKind.CANCELLED and engine.terminal["a"].reason == "client"
    for _ in range(2):
        assert [row.request.request_id for row in engine.step().rows] == ["b"]
    while engine.in_flight:
        engine.commit()
    assert engine.scheduler.stats()["blocks_used"] == len(held.blocks)
    assert engine.scheduler.abort("a", "client") is None


@pytest.mark.parametrize("depth", [0, 1])
def test_a_stop_string_cuts_the_output(depth: int) -> None:
    engine = FakeEngine(config(), depth)
    request = engine.add(make_request("a", [1], 50))
    for _ in range(6):
        engine.step()
    engine.stop_string("a", 3)
    assert (engine.terminal["a"].kind, engine.terminal["a"].reason) == (EventKind.FINISHED, "stop")
    engine.drain(2)
    assert len(request.output) == 3 and engine.scheduler.finish("a", 1) is None
    engine.add(make_request("b", [1], 5))
    with pytest.raises(ValueError, match="num_tokens is -1"):
        engine.scheduler.finish("b", -1)


def test_deadlines_cancel_waiting_and_running_requests() -> None:
    engine = FakeEngine(config(max_num_seqs=1), dt=1.0)
    engine.add(make_request("runs", [1], 50, deadline=4.0))
    engine.add(make_request("waits", [1], 50, deadline=2.0))
    engine.add(make_request("free", [1], 2))
    engine.drain(20)
    for name in ("runs", "waits"):
        assert engine.terminal[name].kind is EventKind.CANCELLED and engine.terminal[name].reason == "timeout"
    assert engine.streamed["waits"] == [] and len(engine.streamed["runs"]) == 3
    assert engine.terminal["free"].kind is EventKind.FINISHED


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_step_fails_its_requests_and_nobody_else(depth: int) -> None:
    engine = FakeEngine(config(max_num_seqs=2), depth)
    for i in range(4):
        engine.add(make_request(f"r{i}", [i] * 6, 6))
    engine.step()
    if not depth:  # a step that fails has not been committed: launch one and keep it
        plan = engine.scheduler.schedule(engine.now)
        engine.launch(plan)
    engine.drop(0)
    engine.drain(30)
    kinds = [engine.terminal[f"r{i}"].kind for i in range(4)]
    assert kinds == [EventKind.FAILED] * 2 + [EventKind.FINISHED] * 2
    engine.check_outputs()


def test_refuse_and_fail() -> None:
    engine = FakeEngine(config())
    engine.add(make_request("new", [1]))
    engine.add(make_request("ran", [1], 9))
    assert engine.scheduler.refuse("new", "gone").kind is EventKind.REFUSED
    engine.submitted.pop("new")
    engine.step()
    assert engine.scheduler.refuse("ran", "gone").kind is EventKind.FAILED
    assert engine.scheduler.fail("ran", "gone") is None
    assert engine.scheduler.refuse("unknown", "gone") is None


# ---- preemption


@pytest.mark.parametrize("depth", [0, 1])
def test_the_newest_of_the_lowest_priority_is_preempted_and_recomputed(depth: int) -> None:
    engine = FakeEngine(config(num_blocks=9, prefix_caching=False), depth)
    engine.add(make_request("low", [1] * 4, 20, priority=1))
    engine.add(make_request("old", [2] * 4, 20))
    engine.add(make_request("new", [3] * 4, 20))
    victims = []
    while engine.scheduler.has_work():
        before = {r.request_id: r.num_preemptions for r in engine.scheduler.requests()}
        engine.step()
        new = [r.request_id for r in engine.scheduler.requests() if r.num_preemptions > before[r.request_id]]
        assert len(new) <= 1  # one has blocks enough, even if they come back only when the step before has ended
        victims += new
    assert victims[:2] == ["low", "new"] and "old" not in victims
    engine.check_outputs()


def test_a_preempted_request_keeps_its_tokens_and_samples_none_again() -> None:
    engine = FakeEngine(config(num_blocks=6, max_num_batched_tokens=5, max_num_seqs=2))
    engine.add(make_request("a", [1] * 4, 16))
    engine.add(make_request("b", [2] * 4, 16))
    sampled: dict[str, list[int]] = {"a": [], "b": []}
    seen_preempted = False
    while engine.scheduler.has_work():
        plan = engine.step()
        for row in plan.rows if plan else ():
            if row.samples:
                sampled[row.request.request_id].append(row.start + row.num_tokens)
        seen_preempted |= any(r.status is Status.PREEMPTED for r in engine.scheduler.requests())
    assert seen_preempted
    assert all(positions == list(range(4, 20)) for positions in sampled.values())
    engine.check_outputs()


def test_a_preempted_request_waits_for_its_token_in_flight() -> None:
    scheduler = Scheduler(config(num_blocks=4, prefix_caching=False))
    old, new = make_request("old", [1] * 7, 8), make_request("new", [2] * 7, 8)
    for request in (old, new):
        scheduler.add(request, 0.0)
    scheduler.commit(scheduler.schedule(0.0), [[3], [3]], 0.0)
    in_flight = scheduler.schedule(0.0)  # fills both requests' blocks
    assert rows(in_flight) == [("old", 7, 1, True), ("new", 7, 1, True)]
    assert scheduler.schedule(0.0) is None  # "old" needs a block, "new" is preempted; its blocks are still read
    assert new.status is Status.PREEMPTED and new.num_in_flight == 1
    scheduler.abort("old", "client")
    scheduler.check_integrity()
    assert scheduler.schedule(0.0) is None
    scheduler.commit(in_flight, [[4], [4]], 0.0)
    assert new.output == [3, 4]
    assert rows(scheduler.schedule(0.0)) == [("new", 0, 9, True)]


def test_what_did_not_fit_is_admitted_as_soon_as_it_does() -> None:
    engine = FakeEngine(config(num_blocks=10, prefix_caching=False, max_num_batched_tokens=32))
    engine.add(make_request("long", [1] * 4, 20))
    engine.add(make_request("short", [2] * 20, 4))
    engine.add(make_request("waits", [3] * 20, 4))
    for _ in range(4):
        assert "waits" not in [r.request.request_id for r in engine.step().rows]
    assert "short" in engine.terminal
    assert [r.request.request_id for r in engine.step().rows] == ["long", "waits"]
    engine.drain(40)
    engine.check_outputs()


def test_ended_requests_are_forgotten() -> None:
    engine = FakeEngine(config())
    for i in range(50):
        engine.add(make_request(f"r{i}", [i, i, i], 3, adapter=AdapterKey(i % 3 + 1, 1)))
        engine.step()
    engine.drain(200)
    core = engine.scheduler._core
    assert not core.requests and not core.flights and not core.running and not len(core.waiting)
    assert not core.slots._users and not core.slots._since


def test_integrity_check_finds_what_is_wrong() -> None:
    engine = FakeEngine(config())
    request = engine.add(make_request("a", [1] * 5, 9, adapter=AdapterKey(1, 1)))
    for _ in range(3):
        engine.step()
    for spoil, message in (
        (lambda: request.blocks.append(request.blocks[0]), "holders"),
        (lambda: setattr(request, "num_in_flight", 1), "in flight"),
        (lambda: setattr(request, "slot", 2), "slot"),
        (lambda: setattr(request, "status", Status.WAITING), "but runs"),
    ):
        saved = {name: getattr(request, name) for name in ("num_in_flight", "slot", "status")}
        blocks = request.blocks[:]
        spoil()
        with pytest.raises(IntegrityError, match=message):
            engine.scheduler.check_integrity()
        for name, value in saved.items():
            setattr(request, name, value)
        request.blocks = blocks
        engine.scheduler.check_integrity()


def test_the_newer_of_two_steps_fails_while_the_older_still_reads() -> None:
    scheduler = Scheduler(config(num_blocks=4, prefix_caching=False, num_adapter_slots=1))
    adapter = AdapterKey(1, 1)
    scheduler.add(make_request("a", [1] * 7, 8, adapter=adapter), 0.0)
    scheduler.add(make_request("b", [2] * 7, 8), 0.0)
    assert rows(scheduler.schedule(0.0)) == [("b", 0, 7, True)]
    scheduler.slot_loaded(1)
    older = scheduler.schedule(0.0)
    assert rows(older) == [("b", 7, 1, True), ("a", 0, 7, True)]
    scheduler.commit(scheduler._core.flights[0].plan, [[3]], 0.0)
    newer = scheduler.schedule(0.0)
    assert rows(newer) == [("a", 7, 1, True)]
    scheduler.abort("a", "client")  # held for the newer step, but the older reads it too
    scheduler.drop(newer)
    scheduler.check_integrity()
    assert scheduler.stats()["blocks_used"] == 4 and scheduler.stats()["slots_used"] == 1
    assert scheduler.commit(older, [[4], [5]], 0.0)[0].tokens == [4]
    assert scheduler.stats()["blocks_used"] == 2 and scheduler.stats()["slots_used"] == 0


def test_the_queue_leaves_out_what_cannot_run_now() -> None:
    queue = WaitingQueue()
    requests = [make_request(name, [1], adapter=AdapterKey(uid, 1)) for name, uid in (("a", 1), ("b", 1), ("c", 2))]
    for i, request in enumerate(requests):
        request.arrival, request.rank = i, float(i)
        queue.add(request)
    a, b, c = requests
    assert queue.first("t", lambda adapter: True, set()) is a
    assert queue.first("t", lambda adapter: True, {a}) is b
    assert queue.first("t", lambda adapter: adapter.uid == 2, set()) is c
    a.num_in_flight = 1  # preempted, and its sampled token is not here yet
    assert queue.first("t", lambda adapter: True, set()) is b
    assert queue.first("t", lambda adapter: True, {b}) is c
    assert queue.first("t", lambda adapter: False, set()) is None
    assert queue.first("u", lambda adapter: True, set()) is None
    queue.remove(b)
    assert list(queue) == [a, c] and len(queue) == 2 and queue.of_adapter(AdapterKey(1, 1)) == [a]


def test_held_requests_wait_and_hold_nobody_up() -> None:
    scheduler = Scheduler(config(max_num_seqs=2))
    requests = [make_request(name, [1, 2, 3]) for name in ("held", "gone", "free")]
    for request in requests:
        request.held = request.request_id != "free"
        scheduler.add(request, 0.0)
    first = scheduler.schedule(0.0)
    assert first is not None and [row[0] for row in rows(first)] == ["free"]
    assert scheduler.abort("gone", "client") is not None
    scheduler.release("gone")  # it has ended
    scheduler.release("held")
    second = scheduler.schedule(0.0)
    assert second is not None and "held" in [row[0] for row in rows(second)]
