"""Random arrivals, aborts, stop strings, drops, loads, preemptions; the fake engine notices every mistake."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.drafts import Drafter
from scheduler.plan import AdmissionError, EventKind
from scheduler.request import BASE, AdapterKey
from tests.scheduler.harness import EOS, FakeDisk, FakeEngine, Guesser, config, make_request

ADAPTERS = [BASE, BASE, *(AdapterKey(uid, 1) for uid in (1, 2, 3))]


def random_request(rng: random.Random, number: int, max_len: int):
    # few distinct beginnings, so that prefixes are shared between requests, tenants and adapters
    prompt = ([rng.randrange(2)] * 20 + [9, 9, 9, 9])[rng.randrange(20) :][: rng.randint(1, max_len)]
    prompt += [rng.randrange(10, 40) for _ in range(rng.choice([0, 0, 1, 5]))]
    return make_request(
        f"r{number}",
        prompt,
        rng.choice([0, 1, 2, 5, 9, 30]),
        adapter=rng.choice(ADAPTERS),
        tenant=rng.choice("ab"),
        priority=rng.choice([0, 0, 0, -1, 3]),
        deadline=None if rng.random() < 0.9 else rng.random() * 3,
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=() if rng.random() < 0.8 else (EOS + 1, EOS + 2),
        prompt_logprobs=None if rng.random() < 0.9 else 0,
        background=rng.random() < 0.3,
        system_tokens=20 * (number % 3),
        part_ends=(4 * (number % 5), 18 + number % 8),
    )


def run(
    seed: int,
    depth: int,
    num_steps: int = 60,
    faults: bool = True,
    drafts: bool = False,
    disk: FakeDisk | None = None,
    states: bool = False,
    lanes: bool = False,
    **changes: object,
) -> FakeEngine:
    rng = random.Random(seed)
    values: dict[str, object] = {
        "num_blocks": rng.choice([3, 5, 8, 16, 40]),
        "max_num_seqs": rng.choice([1, 2, 4, 6]),
        "max_num_batched_tokens": rng.choice([6, 9, 16, 64]),
        "max_model_len": rng.choice([20, 40, 64]),
        "max_queue": rng.choice([3, 20]),
        "num_adapter_slots": rng.choice([1, 2, 3]),
        "prefix_caching": rng.random() < 0.85,
        "aging_s": rng.choice([0.0, 0.1, 10.0]),
        "slot_patience_s": rng.choice([0.0, 0.05, 2.0]),
        "itl_target_s": rng.choice([None, 0.01]),
        "mixed_chunk": rng.choice([None, 1, 5]),
    }
    if disk is not None:
        values |= {"disk_bytes": max(rng.choice([1, 3, 10, 100]), len(disk.kept)), "disk_block_bytes": 1}
    if states:
        values |= {"num_states": rng.choice([1, 2, 6]), "num_snapshots": rng.choice([0, 1, 2, 4, 12])}
        values |= {"snapshot_blocks": rng.choice([0, 1, 3])}
    if lanes:
        values |= {"lane_tokens": random.Random(seed).choice([2, 4, 7, 20])}
        values |= {"lane_budget": random.Random(seed + 1).choice([None, 64])}
    if states and disk is not None:
        values |= {"disk_state_bytes": 2, "disk_bytes": 2 + 2 * max(rng.choice([1, 3, 10, 100]), len(disk.kept))}
    settings = config(**{**values, **changes})
    drafter = Drafter(Guesser(settings, seed), 32, always=seed % 2 == 0) if drafts else None
    pace = random.Random(seed)
    seconds = (lambda plan: pace.uniform(0.001, 0.002) * plan.num_tokens) if drafts else None
    engine = FakeEngine(settings, depth, drafter=drafter, disk=disk, seconds=seconds)
    number = 0
    retired: set[AdapterKey] = set()
    for _ in range(num_steps):
        for _ in range(rng.choice([0, 0, 1, 1, 2, 5])):
            request = random_request(rng, number, 24)
            if disk is not None and rng.random() < 0.9:
                request.kv_digest = repr(request.adapter).encode()
            if request.adapter not in retired:
                number += 1
                try:
                    engine.add(request, rng.choice([1.0, 4.0]))
                except AdmissionError as error:
                    assert error.code in ("queue_full", "too_long")
        if faults:
            fault(rng, engine, retired)
        plan = engine.step()
        if plan is not None:
            engine.scheduler.observe(plan, 0.001 * plan.num_tokens * (1 + plan.step % 3), [None, 5][plan.step % 2])
    engine.hold_loads = engine.disk.stalls = False
    engine.finish_loads()
    engine.drain(20 * (number + 1) + 100)
    engine.check_outputs()
    assert set(engine.terminal) == set(engine.submitted)
    return engine


def fault(rng: random.Random, engine: FakeEngine, retired: set[AdapterKey]) -> None:
    scheduler = engine.scheduler
    live = scheduler.requests()
    what = rng.random()
    if live and what < 0.2:
        request_id = rng.choice(live).request_id
        engine.take(scheduler.abort(request_id, "client"))
        assert scheduler.abort(request_id, "client") is None
    elif live and what < 0.3:
        request = rng.choice(live)
        engine.stop_string(request.request_id, rng.randint(0, len(request.output)))
    elif live and what < 0.33:
        engine.take(scheduler.fail(rng.choice(live).request_id, "fault", spoiled=rng.random() < 0.5))
    elif engine.in_flight and what < 0.4:
        engine.drop(rng.randrange(len(engine.in_flight)))
    elif engine.prompts is not None and what < 0.45:
        engine.drop_prompts()
    elif engine.loading and what < 0.5:
        engine.fail_load(next(iter(engine.loading)))
    elif what < 0.6:
        engine.hold_loads = not engine.hold_loads
    elif what < 0.63:
        engine.disk.stalls = not engine.disk.stalls
    elif what < 0.66 and engine.disk.kept:
        del engine.disk.kept[rng.choice(list(engine.disk.kept))]
    elif what < 0.665:
        engine.disk.full = True
    elif what < 0.69:
        key = rng.choice(ADAPTERS[2:])
        if key not in retired:
            retired.add(key)
            scheduler.retire_adapter(key)


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32), depth=st.sampled_from([0, 1]), drafts=st.booleans())
def test_everything_holds_in_random_runs(seed: int, depth: int, drafts: bool) -> None:
    run(seed, depth, drafts=drafts)


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32), depth=st.sampled_from([0, 1]), drafts=st.booleans(), disk=st.booleans())
def test_everything_holds_with_two_lanes(seed: int, depth: int, drafts: bool, disk: bool) -> None:
    run(seed, depth, lanes=True, drafts=drafts, disk=FakeDisk(seed) if disk else None)


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32), depth=st.sampled_from([0, 1]))
def test_two_lanes_give_the_tokens_of_one(seed: int, depth: int) -> None:
    runs = [run(seed, depth, faults=False, lanes=lanes, max_queue=1000) for lanes in (False, True)]
    finished = [
        {key: (value, e.terminal[key].reason) for key, value in e.streamed.items() if e.submitted[key].deadline is None}
        for e in runs
    ]
    assert finished[0] == finished[1]


def test_random_runs_use_both_lanes() -> None:
    found = [run(seed, 1, faults=False, lanes=True, num_blocks=40, max_num_seqs=6, lane_tokens=6) for seed in range(3)]
    assert all(engine.num_prompt_steps > 3 for engine in found)
    assert all(engine.scheduler.stats()["steps"] > 2 * engine.num_prompt_steps for engine in found)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32), depth=st.sampled_from([0, 1]), tenants=st.sampled_from(["a", "ab"]))
def test_a_step_of_long_prompts_has_enough_of_those_that_can_start(seed: int, depth: int, tenants: str) -> None:
    """Prompts that have no running slot are not counted, and none of them starves."""
    rng = random.Random(seed)
    least = rng.choice([4, 7, 12])
    sizes = {"num_blocks": 400, "max_num_seqs": rng.choice([1, 2, 3]), "max_num_batched_tokens": 16}
    sizes |= {"mixed_chunk": rng.choice([1, 2, 5]), "lane_tokens": least, "lane_budget": rng.choice([None, 64])}
    engine = FakeEngine(config(prefix_caching=False, **sizes), depth)
    for number in range(20):
        prompt = [rng.randrange(10, 40) for _ in range(rng.choice([1, 3, least - 1, least, 24]))]
        engine.add(make_request(f"r{number}", prompt, rng.choice([1, 2, 9]), tenant=rng.choice(tenants)))
        for _ in range(rng.choice([0, 1, 3])):
            engine.step()
            assert engine.prompts is None or engine.prompts[0].num_tokens >= least
    engine.drain(1000)
    engine.check_outputs()
    assert all(event.kind is EventKind.FINISHED for event in engine.terminal.values())


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32), depth=st.sampled_from([0, 1]), drafts=st.booleans())
def test_everything_holds_with_states(seed: int, depth: int, drafts: bool) -> None:
    run(seed, depth, states=True, drafts=drafts)


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32), depth=st.sampled_from([0, 1]), drafts=st.booleans(), states=st.booleans())
def test_everything_holds_with_blocks_on_disk(seed: int, depth: int, drafts: bool, states: bool) -> None:
    """And in the process that finds what a killed one has left."""
    disk = FakeDisk(seed)
    run(seed, depth, drafts=drafts, disk=disk, states=states)
    run(seed + 1, depth, num_steps=30, drafts=drafts, disk=disk.crash(), states=states)


def test_random_runs_use_the_disk() -> None:
    disk = FakeDisk()
    sizes = {"num_blocks": 8, "disk_bytes": 100, "disk_block_bytes": 1, "prefix_caching": True}
    for seed in (1, 2):
        stats = run(seed, 0, disk=disk.crash(), faults=False, **sizes).scheduler.stats()
        assert stats["disk_saved_blocks"] > 0 and stats["disk_hit_tokens"] > 0


def test_random_runs_bring_snapshots_from_the_disk() -> None:
    disk = FakeDisk()
    sizes = {"num_blocks": 8, "disk_bytes": 200, "disk_block_bytes": 1, "disk_state_bytes": 2, "prefix_caching": True}
    sizes |= {"num_states": 2, "num_snapshots": 2}
    totals = [0, 0]
    for seed in range(4):
        stats = run(seed, 0, disk=disk.crash(), faults=False, states=True, **sizes).scheduler.stats()
        totals[0] += stats["disk_saved_snapshots"]
        totals[1] += stats["disk_read_snapshots"]
    assert all(totals)


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32))
def test_depth_one_gives_the_tokens_of_depth_zero(seed: int) -> None:
    runs = [run(seed, depth, faults=False, max_queue=1000) for depth in (0, 1)]
    finished = [
        {key: (value, e.terminal[key].reason) for key, value in e.streamed.items() if e.submitted[key].deadline is None}
        for e in runs
    ]
    assert finished[0] == finished[1]
    assert all(e.terminal[key].kind is EventKind.FINISHED for e in runs for key in finished[0])


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32))
def test_drafts_change_no_tokens_and_save_steps(seed: int) -> None:
    plain, drafted = (run(seed, 0, faults=False, drafts=drafts, max_queue=1000) for drafts in (False, True))
    for key, request in plain.submitted.items():
        if request.deadline is None:
            assert plain.streamed[key] == drafted.streamed[key]
            assert plain.terminal[key].reason == drafted.terminal[key].reason
    stats = drafted.scheduler.stats()
    assert stats["accepted_tokens"] <= stats["drafted_tokens"]
    assert plain.scheduler.stats()["drafted_tokens"] == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_run_can_be_replayed(depth: int) -> None:
    assert run(11, depth).trace == run(11, depth).trace


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32), depth=st.sampled_from([0, 1]), caching=st.booleans())
def test_short_of_blocks_everything_still_comes_out_right(seed: int, depth: int, caching: bool) -> None:
    rng = random.Random(seed)
    engine = FakeEngine(
        config(num_blocks=14, max_num_seqs=6, max_model_len=40, prefix_caching=caching, aging_s=0.05), depth
    )
    for number in range(24):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
        engine.add(
            make_request(f"r{number}", prompt, rng.randint(12, 28), tenant=rng.choice("ab"), priority=number % 3)
        )
        engine.step()
    engine.drain(2000)
    engine.check_outputs()
    assert engine.scheduler.stats()["preemptions"] > 0
    assert all(e.kind is EventKind.FINISHED for e in engine.terminal.values())
