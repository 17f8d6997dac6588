from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from api.errors import ApiError
from api.tenants.limits import Bucket, Limits, Ticket
from api.tenants.record import Tenant

AMOUNTS = st.integers(1, 400)
SECONDS = st.floats(0, 200)


@given(st.integers(1, 1000), st.lists(st.tuples(SECONDS, AMOUNTS)))
def test_a_bucket_never_gives_more_than_a_minute_and_what_has_run_in(
    capacity: int, steps: list[tuple[float, int]]
) -> None:
    now, taken = 0.0, []
    bucket = Bucket(capacity, now)
    for seconds, amount in steps:
        now += seconds
        wait_s = bucket.wait_s(amount, now)
        if not wait_s:
            bucket.take(amount, now)
            taken.append((now, amount))
        elif amount <= capacity:
            assert bucket.wait_s(amount, now + wait_s * 1.0001 + 1e-6) == 0, "the time to wait is enough"
            now += wait_s * 1.0001 + 1e-6  # asking then has moved its clock
    for i, (begin, _) in enumerate(taken):  # of any stretch of time
        total = 0
        for end, amount in taken[i:]:
            total += amount
            assert total <= capacity + (end - begin) * capacity / 60 + 1e-6


class LimitsMachine(RuleBasedStateMachine):
    """Requests come, deliver and end in any order, time passes and limits are changed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.limits = Limits(lambda: self.now)
        self.tenant = Tenant("a", requests_per_minute=5, tokens_per_minute=200, max_concurrency=4)
        self.open: list[tuple[Ticket, int, int]] = []  # reserved output, delivered
        self.allowed = 200.0  # tokens that may have been given out until now
        self.given = 0  # tokens of prompts and outputs that were within what was set aside
        self.debt = 0

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.allowed += seconds * (self.tenant.tokens_per_minute or 0) / 60

    @rule(prompt=st.integers(1, 80), output=st.integers(0, 80), answers=st.integers(1, 3))
    def admit(self, prompt: int, output: int, answers: int) -> None:
        asked = [(0 if i else prompt, output) for i in range(answers)]
        before = self.limits.headers(self.tenant)
        try:
            tickets = self.limits.admit(self.tenant, asked)
        except ApiError as error:
            assert (error.retry_after_s is not None) == (error.status == 429)
            assert self.limits.headers(self.tenant) == before, "a refusal costs nothing"
            return
        self.open += [(ticket, output, 0) for ticket in tickets]
        self.given += prompt

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0), tokens=st.integers(1, 50))
    def deliver(self, index: int, tokens: int) -> None:
        index %= len(self.open)
        ticket, reserved, delivered = self.open[index]
        ticket.delivered(tokens)
        self.open[index] = ticket, reserved, delivered + tokens
        self.debt += max(delivered + tokens, reserved) - max(delivered, reserved)
        self.given += tokens

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0), twice=st.booleans())
    def end(self, index: int, twice: bool) -> None:
        ticket, _, _ = self.open.pop(index % len(self.open))
        for _ in range(1 + twice):
            ticket.end()

    @invariant()
    def never_more_than_allowed(self) -> None:
        assert self.given <= self.allowed + self.debt + 1e-6
        assert len(self.open) <= 4

    @invariant()
    def headers_are_true(self) -> None:
        headers = self.limits.headers(self.tenant)
        for what, limit in (("requests", 5), ("tokens", 200)):
            assert headers[f"x-ratelimit-limit-{what}"] == str(limit)
            assert 0 <= int(headers[f"x-ratelimit-remaining-{what}"]) <= limit
            assert float(headers[f"x-ratelimit-reset-{what}"].removesuffix("s")) >= 0


TestLimits = LimitsMachine.TestCase


def test_retry_after_is_the_time_to_wait() -> None:
    now = [0.0]
    limits = Limits(lambda: now[0])
    tenant = Tenant("a", requests_per_minute=2)
    for _ in range(2):
        limits.admit(tenant, [(1, 1)])
    with pytest.raises(ApiError) as caught:
        limits.admit(tenant, [(1, 1)])
    assert caught.value.status == 429 and caught.value.headers()["Retry-After"] == "30"
    now[0] += 30
    limits.admit(tenant, [(1, 1)])


def test_tenants_do_not_share_limits_and_reloads_keep_the_level() -> None:
    limits = Limits(lambda: 0.0)
    first = Tenant("a", tokens_per_minute=100)
    limits.admit(first, [(100, 0)])
    limits.admit(Tenant("b", tokens_per_minute=100), [(100, 0)])
    limits.keep(["a"])
    with pytest.raises(ApiError):
        limits.admit(first, [(1, 0)])
    with pytest.raises(ApiError, match="minute"):
        limits.admit(Tenant("a", tokens_per_minute=1000), [(1, 0)])
    assert limits.headers(Tenant("a")) == {}


@pytest.mark.parametrize("asked", [[(1, 0)] * 3, [(50, 60)]])
def test_what_never_fits_is_a_400(asked: list[tuple[int, int]]) -> None:
    with pytest.raises(ApiError) as caught:
        Limits().admit(Tenant("a", tokens_per_minute=100, max_concurrency=2), asked)
    assert caught.value.status == 400 and caught.value.param in ("n", "max_tokens")


def test_a_request_that_did_not_run_costs_no_tokens() -> None:
    limits = Limits(lambda: 0.0)
    tenant = Tenant("a", tokens_per_minute=100, max_concurrency=1)
    for _ in range(3):
        (ticket,) = limits.admit(tenant, [(60, 40)])
        ticket.end(ran=False)
    assert limits.headers(tenant)["x-ratelimit-remaining-tokens"] == "100"
