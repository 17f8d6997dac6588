"""The book of deadlines finds what a look at every request would, and holds little more than the live ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.policy.deadlines import Deadlines
from scheduler.request import Request, SamplingParams

DEADLINES = st.none() | st.integers(0, 20).map(float)


@given(st.lists(st.tuples(st.sampled_from("aaaeen"), DEADLINES, st.integers(0, 7)), max_size=60))
def test_as_a_look_at_every_request(moves: list[tuple[str, float | None, int]]) -> None:
    live: dict[str, Request] = {}
    book, now = Deadlines(live), 0.0
    for arrival, (move, deadline, number) in enumerate(moves):
        if move == "a" and f"r{number}" not in live:
            request = Request(f"r{number}", [1], SamplingParams(), deadline=deadline, arrival=arrival)
            live[request.request_id] = request
            book.add(request)
        elif move == "e":
            live.pop(f"r{number}", None)
        else:
            now += 2
            late = {key for key, request in live.items() if request.deadline is not None and request.deadline <= now}
            found = book.take_late(now)
            assert {request.request_id for request in found} == late
            assert [request.deadline for request in found] == sorted(request.deadline for request in found)
            for key in late:
                del live[key]


def test_ended_requests_are_forgotten() -> None:
    live: dict[str, Request] = {}
    book = Deadlines(live)
    for i in range(10_000):
        live.clear()
        live[f"r{i}"] = Request(f"r{i}", [1], SamplingParams(), deadline=1e9, arrival=i)
        book.add(live[f"r{i}"])
    assert len(book) < 100
