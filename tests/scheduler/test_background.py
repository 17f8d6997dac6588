"""Background requests take what live ones leave: nothing of a live request's course changes, and all of them end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.plan import AdmissionError, EventKind
from scheduler.request import AdapterKey, Status
from tests.scheduler.harness import FakeEngine, config, make_request


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: int
    max_tokens: int
    tenant: str
    priority: int
    background: bool


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 30),
        prompt=st.integers(1, 20),
        max_tokens=st.integers(0, 12),
        tenant=st.sampled_from("ab"),
        priority=st.integers(-2, 2),
        background=st.booleans(),
    ),
    max_size=14,
)
CONFIGS = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(8, 24),
        "max_num_seqs": st.integers(1, 4),
        "max_num_batched_tokens": st.integers(4, 24),
        "mixed_chunk": st.none() | st.integers(1, 8),
        "max_queue": st.integers(1, 6),
        "aging_s": st.sampled_from([0.0, 10.0]),
    }
)


def course(
    arrivals: Sequence[Arrival | None], depth: int, changes: dict[str, object]
) -> tuple[FakeEngine, list[list[str]]]:
    """The engine after all has ended, and the live requests of each step."""
    engine = FakeEngine(config(prefix_caching=False, **changes), depth)
    plans: list[list[str]] = []
    for step in range(31):
        for number, arrival in enumerate(arrivals):
            if arrival is None or arrival.step != step:
                continue
            request = make_request(
                f"r{number}", [1] * arrival.prompt, arrival.max_tokens, tenant=arrival.tenant,
                priority=arrival.priority, background=arrival.background,
            )  # fmt: skip
            try:
                engine.add(request)
            except AdmissionError as error:
                assert error.code == "queue_full"
                engine.trace.append(("full", request.request_id))
        plan = engine.step()
        rows = [] if plan is None else plan.rows
        assert len({row.request.background for row in rows}) <= 1, "live and background rows in one step"
        plans.append([row.request.request_id for row in rows if not row.request.background])
    engine.drain(3000)
    engine.check_outputs()
    return engine, plans


@given(ARRIVALS, CONFIGS)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_live_requests_run_as_if_alone(arrivals, changes) -> None:
    """Same steps, same refusals, whatever background work there is."""
    _, plans = course(arrivals, 0, changes)
    _, alone = course([None if arrival.background else arrival for arrival in arrivals], 0, changes)
    assert plans == alone


@given(ARRIVALS, CONFIGS, st.sampled_from([0, 1]))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_all_background_requests_end_when_live_ones_have(arrivals, changes, depth) -> None:
    engine, _ = course(arrivals, depth, changes)
    assert set(engine.terminal) == set(engine.submitted) - {
        name for kind, name, *_ in (t for t in engine.trace if isinstance(t, tuple)) if kind == "full"
    }


def test_background_work_never_ages_above_live_requests() -> None:
    engine = FakeEngine(config(max_num_seqs=1, aging_s=0.0), dt=1000.0)
    engine.add(make_request("batch", [1], 30, background=True))
    for number in range(20):
        live = engine.add(make_request(f"live{number}", [2, 3], 2, priority=1000))
        engine.step()
        assert live.status is Status.RUNNING
        while f"live{number}" not in engine.terminal:
            engine.step()
    engine.drain(200)
    assert engine.terminal["batch"].kind is EventKind.FINISHED


def test_a_live_request_gets_the_slot_of_an_adapter_that_background_work_uses() -> None:
    engine = FakeEngine(config(num_adapter_slots=1, max_model_len=200, num_blocks=60, slot_patience_s=1e9))
    work = engine.add(make_request("batch", [1], 100, adapter=AdapterKey(1, 1), background=True))
    for _ in range(5):
        engine.step()
    assert work.status is Status.RUNNING
    live = engine.add(make_request("live", [2], 2, adapter=AdapterKey(2, 1)))
    for _ in range(6):
        engine.step()
    assert live.status is Status.FINISHED and not work.status.terminal
    engine.drain(400)
    assert work.status is Status.FINISHED


def test_a_full_queue_of_background_work_refuses_no_live_request() -> None:
    engine = FakeEngine(config(max_queue=2, max_num_seqs=1))
    for number in range(3):
        engine.add(make_request(f"batch{number}", [1], 30, background=True))
        engine.step()
    with pytest.raises(AdmissionError, match="waiting"):
        engine.add(make_request("more", [1], background=True))
    lives = [engine.add(make_request(f"live{number}", [1])) for number in range(2)]
    engine.drain(300)
    assert all(live.status is Status.FINISHED for live in lives)


def test_a_tenants_batch_costs_its_live_requests_no_share() -> None:
    engine = FakeEngine(config(max_num_seqs=1))
    engine.add(make_request("batch", [1], 60, tenant="a", background=True))
    engine.drain(100)
    stats = engine.scheduler.stats()
    assert stats["background_service/a"] > 0 and not stats.get("tenant_service/a")


def test_a_tenant_cannot_be_named_like_background_work() -> None:
    with pytest.raises(AdmissionError, match="NUL"):
        FakeEngine(config()).add(make_request("r", [1], tenant="a\0"))
