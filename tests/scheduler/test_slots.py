"""Adapter slots: loads, failures, retirement, and that no adapter starves."""

from __future__ import annotations

import pytest

from scheduler.errors import IntegrityError
from scheduler.plan import EventKind, SlotLoad
from scheduler.request import BASE, AdapterKey
from scheduler.scheduler import Scheduler
from tests.scheduler.harness import FakeEngine, config, make_request

A, B, C = (AdapterKey(uid, 1) for uid in (1, 2, 3))


def test_requests_wait_for_their_adapter_and_nobody_waits_for_them() -> None:
    engine = FakeEngine(config())
    engine.hold_loads = True
    engine.add(make_request("a", [1], 3, adapter=A))
    engine.add(make_request("base", [1], 3))
    plan = engine.step()
    assert [r.request.request_id for r in plan.rows] == ["base"]
    assert engine.loading == {1: A} and engine.scheduler.slot_loads() == []
    engine.hold_loads = False
    engine.step()
    plan = engine.step()
    assert [(r.request.request_id, r.adapter_slot) for r in plan.rows] == [("base", 0), ("a", 1)]
    engine.drain(10)
    engine.check_outputs()


def test_an_adapter_stays_resident_until_its_slot_is_needed() -> None:
    engine = FakeEngine(config(num_adapter_slots=2))
    for i, adapter in enumerate((A, B, A, C, A)):
        engine.add(make_request(f"r{i}", [1], 2, adapter=adapter))
        engine.drain(10)
    assert [e for e in engine.trace if isinstance(e, SlotLoad)] == [SlotLoad(1, A), SlotLoad(2, B), SlotLoad(2, C)]


def test_a_failed_load_refuses_those_that_never_ran_and_fails_the_others() -> None:
    engine = FakeEngine(config(num_adapter_slots=1, num_blocks=4, max_num_seqs=2, slot_patience_s=0.0))
    engine.add(make_request("first", [1] * 4, 11, adapter=A))
    engine.add(make_request("ran", [2] * 4, 11, adapter=A))
    while not engine.submitted["ran"].num_preemptions:
        engine.step()
    engine.add(make_request("b", [1], 2, adapter=B))  # takes the slot when "first" has ended
    engine.add(make_request("new", [1], 2, adapter=A))
    engine.hold_loads = True
    while B not in engine.loading.values():
        engine.step()
    engine.finish_loads()
    while A not in engine.loading.values():
        engine.step()
    engine.fail_load(1)
    assert engine.terminal["ran"].kind is EventKind.FAILED
    assert engine.terminal["new"].kind is EventKind.REFUSED and engine.terminal["new"].reason == "no such file"
    engine.hold_loads = False
    engine.add(make_request("again", [1], 2, adapter=A))  # a later one tries again
    engine.drain(20)
    assert engine.terminal["again"].kind is EventKind.FINISHED


def test_a_retired_adapter_goes_when_its_last_request_and_step_have_ended() -> None:
    engine = FakeEngine(config(num_adapter_slots=1), depth=1)
    scheduler = engine.scheduler
    engine.add(make_request("running", [1], 6, adapter=A))
    for _ in range(3):
        engine.step()
    engine.add(make_request("waiting", [1, 2], 60, adapter=A))
    scheduler.retire_adapter(A)
    while len(engine.streamed["waiting"]) < 9:
        assert scheduler.released_adapters() == []
        engine.step()
    engine.stop_string("waiting", 9)
    assert engine.in_flight and scheduler.released_adapters() == []  # a step still reads the slot
    engine.commit()
    assert scheduler.released_adapters() == [A] and scheduler.released_adapters() == []
    assert all(slot.adapter is None for slot in scheduler._core.slots.slots)
    assert all(e.kind is EventKind.FINISHED for e in engine.terminal.values())


def test_retiring_what_nobody_uses() -> None:
    engine = FakeEngine(config())
    engine.scheduler.retire_adapter(A)
    assert engine.scheduler.released_adapters() == [A]
    engine.hold_loads = True
    engine.add(make_request("b", [1], 2, adapter=B))
    engine.step()
    engine.take(engine.scheduler.abort("b", "client"))
    engine.scheduler.retire_adapter(B)
    assert engine.scheduler.released_adapters() == []  # the engine is still writing into the slot
    engine.finish_loads()
    assert engine.scheduler.released_adapters() == [B]
    with pytest.raises(IntegrityError):
        engine.scheduler.retire_adapter(BASE)


def test_a_slot_that_does_not_load_cannot_have_loaded() -> None:
    scheduler = Scheduler(config())
    for slot in (0, 1, 3):
        with pytest.raises(IntegrityError, match=f"slot {slot} is not loading"):
            scheduler.slot_loaded(slot)
        with pytest.raises(IntegrityError, match=f"slot {slot} is not loading"):
            scheduler.slot_failed(slot, "no")


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("load_steps", [0, 40])
def test_a_popular_set_of_adapters_cannot_starve_another(depth: int, load_steps: int) -> None:
    """Two adapters' traffic never pauses in two slots; loading takes longer than an adapter's patience."""
    engine = FakeEngine(config(slot_patience_s=0.3, max_num_seqs=8, num_blocks=64), depth)
    rare, num_steps, load_left = None, 0, 0
    while rare is None or rare.request_id not in engine.terminal:
        for adapter in (A, B):
            while sum(r.adapter == adapter for r in engine.scheduler.requests()) < 6:
                number = len(engine.submitted)
                engine.add(make_request(f"r{number}", [num_steps % 9], 3 + 5 * (number % 4), adapter=adapter))
        if num_steps == 30 + 2 * load_steps:
            rare = engine.add(make_request("rare", [1], 5, adapter=C))
        if engine.loading:
            load_left = load_left - 1 if load_left else load_steps
        engine.hold_loads = load_left > 1
        engine.step()
        if rare is None and num_steps > 20 + 2 * load_steps:
            assert all(slot.pins for slot in engine.scheduler._core.slots.slots)  # no slot is free by chance
        num_steps += 1
        assert num_steps < 150 + 6 * load_steps
    # and the popular ones came back
    for _ in range(300 + 4 * load_steps):
        engine.hold_loads = False
        engine.step()
    engine.drain(300)
    engine.check_outputs()
    assert all(e.kind is EventKind.FINISHED for e in engine.terminal.values())


def test_two_adapters_in_one_slot_take_turns_without_evicting_each_other_unused() -> None:
    engine = FakeEngine(config(num_adapter_slots=1, slot_patience_s=0.0, aging_s=0.0))
    for i in range(20):
        engine.add(make_request(f"r{i}", [i], 2, adapter=(A, B)[i % 2]))
    engine.drain(200)
    loads = [e for e in engine.trace if isinstance(e, SlotLoad)]
    assert len(loads) <= 20
    engine.check_outputs()


@pytest.mark.parametrize(("slots", "most"), [(1, 1), (2, 1), (4, 2), (5, 3)])
def test_half_of_the_slots_go_on_while_others_wait_for_theirs(slots: int, most: int) -> None:
    """As many adapters again want a slot, all of them for longer than they are to wait."""
    running = [AdapterKey(uid, 1) for uid in range(1, slots + 1)]
    engine = FakeEngine(config(num_adapter_slots=slots, max_num_seqs=12, num_blocks=400, slot_patience_s=0.0), dt=0.01)
    for i, adapter in enumerate(running):
        engine.add(make_request(f"r{i}", [i], 40, adapter=adapter))
    for _ in range(3):
        engine.step()
    for i in range(slots):
        engine.add(make_request(f"w{i}", [i], 2, adapter=AdapterKey(100 + i, 1)))
    engine.step()
    for i, adapter in enumerate(running):
        engine.add(make_request(f"more{i}", [i], 2, adapter=adapter))
    plan = engine.step()
    began = [row.request.request_id for row in plan.rows if row.request.request_id.startswith("more")]
    assert len(began) == slots - most
    engine.drain(400)
    assert all(event.kind is EventKind.FINISHED for event in engine.terminal.values())
