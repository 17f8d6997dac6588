"""Background steps are as short as live requests need them, and as long as they like where there are none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.plan import EventKind, StepPlan
from scheduler.policy.cost import MIN_SAMPLES
from scheduler.policy.gaps import IDLE_SHARE, MOST_PAUSE_S, SHARE
from scheduler.scheduler import Scheduler
from tests.scheduler.harness import config, make_request

LIVE_TOKENS = 30


class Timed:
    """A scheduler whose steps take as long as they have work, and a clock that stands still in between."""

    def __init__(self, base_s: float, token_s: float) -> None:
        self.scheduler = Scheduler(
            config(num_blocks=400, max_num_seqs=32, max_num_batched_tokens=64, prefix_caching=False)
        )
        self.began = 0.0  # the last step
        self.now, self._base_s, self._token_s = 0.0, base_s, token_s

    def takes_s(self, tokens: int) -> float:
        return self._base_s + self._token_s * tokens

    def add(self, name: str, tokens: int, *, background: bool) -> None:
        self.scheduler.add(make_request(name, [1] * 20, tokens, background=background), self.now)

    def step(self) -> tuple[StepPlan | None, list[str]]:
        """What ran, once something could, and who finished."""
        plan = self.scheduler.schedule(self.now)
        for _ in range(1000 if self.scheduler.requests() else 0):
            if plan is not None:
                break
            self.now += MOST_PAUSE_S / 1000
            plan = self.scheduler.schedule(self.now)
        if plan is None:
            return None, []
        self.began = self.now
        seconds = self.takes_s(plan.num_tokens)
        self.now += seconds
        events = self.scheduler.commit(plan, [[1] if row.samples else [] for row in plan.rows], self.now)
        self.scheduler.observe(plan, seconds, None)
        return plan, [event.request.request_id for event in events if event.kind is EventKind.FINISHED]

    def live(self, name: str) -> float:
        """Seconds that a live request takes."""
        began = self.now
        self.add(name, LIVE_TOKENS, background=False)
        while name not in self.step()[1]:
            pass
        return self.now - began

    def background(self, name: int) -> None:
        """Sixteen requests in flight at the least."""
        for number in range(16 - len(self.scheduler.requests())):
            self.add(f"b{name}.{number}", 25, background=True)


def timed_alone(base_s: float = 1e-3, token_s: float = 1e-3) -> Timed:
    """With background requests alone so far, of whose steps the cost is known."""
    timed = Timed(base_s, token_s)
    timed.background(0)
    for _ in range(2 * MIN_SAMPLES):
        timed.step()
    return timed


@given(st.floats(1e-4, 1e-2), st.floats(1e-5, 1e-2), st.floats(0, 50))
def test_a_step_between_live_requests_is_short(base_s: float, token_s: float, idle_s: float) -> None:
    """As short as one of a single token, or below the share of what a live request takes and of the time without."""
    timed = timed_alone(base_s, token_s)
    alone_s = timed.live("first")
    seen = 0
    for number in range(1, 12):
        timed.background(number)
        timed.now += idle_s if number == 6 else 0.0
        last = timed.now - (idle_s if number == 6 else 0.0)
        for _ in range(3):
            plan, _ = timed.step()
            assert plan is not None and all(row.request.background for row in plan.rows)
            seen += plan.num_tokens
            allowed_s = SHARE * alone_s * 1.5 + IDLE_SHARE * (
                timed.began - last
            )  # those after the first begin a bit later
            assert timed.now - timed.began <= 1.05 * max(allowed_s, timed.takes_s(1))
        timed.live(f"l{number}")
    assert seen


def test_a_batch_alone_has_whole_steps() -> None:
    timed = Timed(1e-3, 1e-3)
    timed.background(0)
    most = 0
    for number in range(60):
        plan, _ = timed.step()
        timed.background(number + 1)
        most = max(most, plan.num_tokens if plan else 0)
    assert most == 64


def test_long_without_live_requests_steps_are_whole_again() -> None:
    timed = timed_alone()
    timed.live("first")
    plan, _ = timed.step()
    assert plan is not None and plan.num_tokens < 8
    timed.now += 100.0
    for number in range(2 * MIN_SAMPLES):
        timed.background(number + 1)
        plan, _ = timed.step()
    assert plan is not None and len(plan.rows) >= 16


def test_a_client_that_follows_up_meets_no_background_step() -> None:
    timed = timed_alone()
    timed.live("first")
    assert timed.scheduler.schedule(timed.now) is None, "the next one may come at once"
    timed.add("second", 1, background=False)
    assert timed.step()[1] == ["second"]
    plan, _ = timed.step()
    assert plan is not None and plan.rows[0].request.background, "it did not come"


@given(st.floats(1e-4, 1e-2), st.floats(1e-5, 1e-2), st.floats(0, 3))
def test_what_is_in_flight_counts_towards_what_a_live_request_may_wait(
    base_s: float, token_s: float, idle_s: float
) -> None:
    """Two steps may be: together they are as short as one may be, or the second is not begun."""
    timed = timed_alone(base_s, token_s)
    alone_s = timed.live("first")
    for number in range(1, 6):
        timed.background(number)
        last, timed.now = timed.now, timed.now + MOST_PAUSE_S + idle_s
        plans = [plan for plan in (timed.scheduler.schedule(timed.now) for _ in range(2)) if plan is not None]
        assert plans and all(plan.rows[0].request.background for plan in plans)
        waits_s = sum(timed.takes_s(plan.num_tokens) for plan in plans)
        allowed_s = SHARE * alone_s * 1.5 + IDLE_SHARE * (timed.now - last)
        # a step of one row at least, behind what left time
        assert waits_s <= 1.05 * max(allowed_s + timed.takes_s(1) * (len(plans) - 1), timed.takes_s(1))
        for plan in plans:
            seconds = timed.takes_s(plan.num_tokens)
            timed.now += seconds
            timed.scheduler.commit(plan, [[1] if row.samples else [] for row in plan.rows], timed.now)
            timed.scheduler.observe(plan, seconds, None)
        timed.live(f"l{number}")
