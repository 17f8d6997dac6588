"""How many replicas: by open requests, and by how late first tokens come."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.http.metrics import Metrics
from cluster.scaling.first_tokens import LEAST_S, MOST_S, FirstTokens, counts, quantile
from cluster.scaling.policy import ByFirstTokens, Load, replicas

TARGET_S, PER_REPLICA = 2.5, 16.0
numbers = st.integers(1, 50)
seconds = st.floats(0.0, 200.0)
opened = st.floats(0.0, 2000.0)


def steady(running: int, requests: float, ttft_s: float | None) -> float:
    return replicas(Load(running, running, requests, ttft_s, settling=False), PER_REPLICA, TARGET_S)


@given(running=numbers, requests=opened, ttft_s=seconds, later_s=seconds, more=opened)
def test_later_tokens_and_more_requests_never_ask_for_less(
    running: int, requests: float, ttft_s: float, later_s: float, more: float
) -> None:
    asked = steady(running, requests, ttft_s)
    assert asked <= steady(running, requests, ttft_s + later_s) and asked <= steady(running, requests + more, ttft_s)


@given(running=numbers, ttft_s=seconds)
def test_first_tokens_move_the_number_by_bounded_steps(running: int, ttft_s: float) -> None:
    asked = steady(running, 0.0, ttft_s)
    assert max(1, running - 1) <= asked <= 2 * running and asked == int(asked)
    assert (asked > running) == (ttft_s > TARGET_S)


@given(running=numbers, requests=opened, ttft_s=st.none() | seconds)
def test_open_requests_ask_for_what_they_ask_of_serve_alone(
    running: int, requests: float, ttft_s: float | None
) -> None:
    assert steady(running, requests, ttft_s) >= requests / PER_REPLICA
    assert steady(running, requests, None) == requests / PER_REPLICA


@given(running=numbers, ttfts=st.lists(st.floats(TARGET_S / 2, TARGET_S, exclude_min=True), min_size=1))
def test_between_early_and_late_nothing_changes(running: int, ttfts: list[float]) -> None:
    now = running
    for ttft_s in ttfts:
        now = int(steady(now, 0.0, ttft_s))
        assert now == running


@given(running=st.integers(2, 50), ttft_s=seconds)
def test_one_replica_less_would_still_be_early(running: int, ttft_s: float) -> None:
    if steady(running, 0.0, ttft_s) < running:
        assert ttft_s * running / (running - 1) <= TARGET_S / 2


@given(wanted=numbers, running=numbers, ttft_s=st.none() | seconds, requests=opened)
def test_what_was_decided_is_waited_for(wanted: int, running: int, ttft_s: float | None, requests: float) -> None:
    started = Load(running, wanted, requests, ttft_s, settling=True)
    if running != wanted or ttft_s is None:
        assert replicas(started, PER_REPLICA, TARGET_S) == max(wanted, requests / PER_REPLICA)


def page(metrics: Metrics) -> str:
    return metrics.render().decode()


def test_a_replica_tells_what_came_since_it_was_asked() -> None:
    metrics, told = Metrics(), FirstTokens()
    assert told.since(page(metrics)) == {}
    for tenant, ttft_s in (("a", 0.3), ('b",le="7', 0.4), ("a", 3.0)):
        metrics.ttft.labels(tenant).observe(ttft_s)
    metrics.queue.labels("a").observe(0.001)
    found = counts(told.since(page(metrics)))
    assert {bound: count for bound, count in found.items() if count} == {0.5: 2, 5.0: 1}
    assert (min(found), max(bound for bound in found if math.isfinite(bound))) == (LEAST_S, MOST_S)
    assert told.since(page(metrics)) == {}
    metrics.ttft.labels("a").observe(500.0)
    assert [bound for bound, count in counts(told.since(page(metrics))).items() if count] == [math.inf]


@given(times=st.lists(st.floats(0.001, 119.0), min_size=1, max_size=30))
def test_the_quantile_is_in_the_bucket_that_has_it(times: list[float]) -> None:
    metrics = Metrics()
    for ttft_s in times:
        metrics.ttft.labels("a").observe(ttft_s)
    found = counts(FirstTokens().since(page(metrics)))
    exact = sorted(times)[math.ceil(0.9 * len(times)) - 1]
    upper = min(bound for bound in found if bound >= exact)
    lower = max((bound for bound in found if bound < upper), default=0.0)
    assert lower <= quantile(0.9, found) <= upper
    assert quantile(0.9, {1.0: 0.0, math.inf: 1.0}) == MOST_S


def test_of_no_first_tokens_there_is_no_quantile() -> None:
    with pytest.raises(ValueError, match="no first tokens"):
        quantile(0.9, {1.0: 0.0})


class Point(NamedTuple):
    timestamp: float
    value: float


class Service:
    """As Serve calls a policy: without its delays."""

    def __init__(self) -> None:
        self.policy, self.state = ByFirstTokens(TARGET_S), dict[str, Any]()
        self.running = self.target = 1
        self.now, self.points = 100.0, defaultdict[str, dict[str, list[Point]]](lambda: {"r": []})

    def came(self, *ttfts: float) -> None:
        metrics = Metrics()
        for ttft_s in ttfts:
            metrics.ttft.labels("a").observe(ttft_s)
        for name, count in FirstTokens().since(page(metrics)).items():
            self.points[name]["r"].append(Point(self.now, count))

    def decide(self, requests: float = 0.0) -> float:
        config = SimpleNamespace(look_back_period_s=30.0, get_target_ongoing_requests=lambda: PER_REPLICA)
        context = SimpleNamespace(
            current_num_replicas=self.running, target_num_replicas=self.target, total_num_requests=requests,
            raw_metrics=self.points, policy_state=self.state, current_time=self.now, config=config,
        )  # fmt: skip
        asked, self.state = self.policy(context)
        return asked


def test_replicas_come_while_first_tokens_are_late_and_go_when_none_come() -> None:
    service = Service()
    assert service.decide() == 1.0
    service.now += 6.0
    service.came(*[3.0] * 4)
    assert service.decide() == 1.0, "four are too few"
    service.came(*[3.0] * 4)
    assert service.decide() == 2.0
    service.target = 2
    assert service.decide() == 2.0
    service.now += 20.0
    service.came(*[100.0] * 9)
    assert service.decide() == 2.0 and service.decide(80.0) == 5.0, "the second has not started"
    service.running = 2
    assert service.decide() == 2.0, "what came before it says nothing of it"
    service.now += 6.0
    service.came(*[1.5] * 9)
    assert service.decide() == 2.0
    service.now += 40.0
    assert service.decide() == 0.0, "nothing came for so long as is looked back"


def test_without_replicas_serve_decides() -> None:
    service = Service()
    service.running = service.target = 0
    assert service.decide() == 0.0
