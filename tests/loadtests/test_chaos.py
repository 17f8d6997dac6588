"""What `make chaos` leaves out as its own doing, and what it does not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadtests.chaos.availability import RESTART_S, Availability, Look

_EVERY_S = 0.125  # looks at /health, each of which takes no time


def run_of(attacks: list[tuple[float, float]], down: list[tuple[float, float]], ends_s: float) -> Availability:
    """A server that is `down` at these times, with a look and a request now and then."""
    seen = Availability(attacks=attacks)
    for i in range(int(ends_s / _EVERY_S)):
        at_s = i * _EVERY_S
        good = not any(began_s <= at_s < until_s for began_s, until_s in down)
        for what in ("health", "request"):
            seen.add(what, Look(at_s, at_s, good))
    return seen


def share(seen: Availability) -> float:
    return seen.share(("request",), "health")[0]


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(1, RESTART_S - 1)), max_size=8))
def test_a_restart_in_time_counts_for_nothing(kills: list[tuple[float, float]]) -> None:
    """(seconds of service before it, seconds that its restart takes) of each kill."""
    attacks, now_s = [], 0.0
    down = []
    for served_s, restart_s in kills:
        now_s += served_s
        attacks.append((now_s, now_s))
        down.append((now_s, now_s + restart_s))
        now_s += restart_s + 1
    seen = run_of(attacks, down, now_s + 10)
    assert share(seen) == 1.0 and seen.share(("health",), "health")[0] == 1.0


@given(st.integers(3, 10), st.floats(2 * RESTART_S, 4 * RESTART_S))
def test_a_restart_that_waits_counts(kills: int, restart_s: float) -> None:
    """20 s of service before each kill: with no more than half of each restart left out, fewer than 85% are good."""
    attacks = [(20 + i * (20 + restart_s),) * 2 for i in range(kills)]
    seen = run_of(attacks, [(at_s, at_s + restart_s) for at_s, _ in attacks], kills * (20 + restart_s))
    assert share(seen) < 0.6


def test_faults_without_a_kill_count() -> None:
    assert share(run_of([], [(10, 30)], 40)) == 0.5
    assert Availability().share(("request",), "health") == (0.0, 0)


def test_requests_that_a_kill_ends_are_left_out() -> None:
    seen = run_of([(10, 10)], [(10, 12)], 20)
    seen.add("request", Look(1, 10.01, False))
    assert share(seen) == 1.0
    seen.add("request", Look(1, 9.9, False))
    assert share(seen) < 1.0
