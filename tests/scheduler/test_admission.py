"""Which requests are taken, and what those that are not are told."""

from __future__ import annotations

import pytest

from scheduler.plan import AdmissionError
from scheduler.request import AdapterKey
from scheduler.scheduler import Scheduler
from tests.scheduler.harness import FakeEngine, config, make_request


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("num_blocks", 0),
        ("max_num_seqs", 0),
        ("block_size", 0),
        ("max_queue", 0),
        ("num_adapter_slots", -1),
        ("max_num_batched_tokens", 3),  # below max_num_seqs
        ("mixed_chunk", 0),
        ("itl_target_s", 0.0),
        ("itl_target_s", float("nan")),
        ("aging_s", -1.0),
        ("prefill_weight", float("inf")),
    ],
)
def test_config_names_what_is_out_of_range(change: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{change} is {value}"):
        config(**{change: value})


def refusal(scheduler: Scheduler, request) -> AdmissionError:
    with pytest.raises(AdmissionError) as caught:
        scheduler.add(request, 0.0)
    scheduler.check_integrity()
    return caught.value


def test_prompts_that_can_never_fit_are_refused_at_once() -> None:
    error = refusal(Scheduler(config(max_model_len=10)), make_request("a", [1] * 10))
    assert error.code == "too_long"
    assert "10 tokens" in str(error) and "length limit" in str(error)
    error = refusal(Scheduler(config(num_blocks=2, block_size=4)), make_request("a", [1] * 8))
    assert error.code == "too_long" and "8 tokens" in str(error) and "KV cache" in str(error)
    Scheduler(config(max_model_len=10)).add(make_request("a", [1] * 9), 0.0)
    Scheduler(config(max_model_len=10)).add(make_request("a", [1] * 10, max_tokens=0), 0.0)


def test_the_queue_is_bounded_and_says_when_to_come_again() -> None:
    scheduler = Scheduler(config(max_queue=2))
    for i in range(2):
        scheduler.add(make_request(f"r{i}", [1]), 0.0)
    error = refusal(scheduler, make_request("r2", [1]))
    assert error.code == "queue_full" and error.retry_after_s is not None and 1 <= error.retry_after_s <= 60
    scheduler.abort("r0", "client")
    scheduler.add(make_request("r2", [1]), 0.0)


def test_a_tenants_part_of_the_queue() -> None:
    scheduler = Scheduler(config(max_queue=10))
    for i in range(3):
        scheduler.add(make_request(f"a{i}", [1], tenant="a"), 0.0, max_waiting=3)
    with pytest.raises(AdmissionError) as caught:
        scheduler.add(make_request("a3", [1], tenant="a"), 0.0, max_waiting=3)
    assert caught.value.code == "queue_full" and caught.value.retry_after_s
    scheduler.add(make_request("b", [1], tenant="b"), 0.0, max_waiting=1)
    scheduler.abort("a0", "client")
    scheduler.add(make_request("a3", [1], tenant="a"), 0.0, max_waiting=3)


def test_retry_after_follows_the_pace_at_which_requests_end() -> None:
    engine = FakeEngine(config(max_queue=40, max_num_seqs=1), dt=1.0)
    for i in range(40):
        engine.add(make_request(f"r{i}", [1], 4))
    for _ in range(40):
        engine.step()
    for i in range(40, 50):
        engine.add(make_request(f"r{i}", [1], 4))
    error = refusal(engine.scheduler, make_request("late", [1]))
    assert error.retry_after_s == 60  # half of 40, four steps of a second each: at the bound


def test_other_refusals() -> None:
    scheduler = Scheduler(config(num_adapter_slots=0))
    scheduler.add(make_request("a", [1]), 0.0)
    assert refusal(scheduler, make_request("a", [1])).code == "duplicate"
    assert refusal(scheduler, make_request("b", [])).code == "empty_prompt"
    assert refusal(scheduler, make_request("c", [1], adapter=AdapterKey(1, 1))).code == "no_adapter_slots"
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(AdmissionError, match=f"weight of tenant 't' is {weight}"):
            scheduler.add(make_request("d", [1]), 0.0, tenant_weight=weight)
    scheduler.check_integrity()
