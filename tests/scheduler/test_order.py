"""In which order snapshots are evicted, without a scheduler."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.memory.order import Kind, Order


def drained(order: Order, now: int, keys: set[bytes]) -> list[bytes]:
    """All of them, as they are evicted."""
    found = []
    while (key := order.first(now, lambda _: False)) is not None:
        order.remove(key)
        found.append(key)
    assert set(found) == keys and order.first(now, lambda _: False) is None
    return found


def test_of_a_kind_the_least_recently_used_goes_first_but_for_what_is_held() -> None:
    order = Order()
    for now, key in enumerate([b"a", b"b", b"c"]):
        order.add(key, Kind.SHARED, now, counts=True)
    order.touch(b"a", 3)
    assert order.first(4, lambda key: key == b"b") == b"c"
    order.evict_first([b"a"])
    assert order.used(b"a") < 0 and drained(order, 4, {b"a", b"b", b"c"}) == [b"a", b"b", b"c"]


@pytest.mark.parametrize(("of_parts", "of_turns", "first"), [(1, 9, b"part"), (9, 1, b"turn")])
def test_the_kind_that_fewer_begin_from_goes_first(of_parts: int, of_turns: int, first: bytes) -> None:
    order = Order()
    for number in range(10):
        for kind, reads in ((Kind.PART, of_parts), (Kind.TURN, of_turns)):
            order.add(key := b"%d" % number, kind, number, counts=True)
            if number < reads:
                order.count_read(kind)
            order.remove(key)
    for now, key in enumerate([b"part", b"turn"] if first == b"turn" else [b"turn", b"part"], 10):
        order.add(key, Kind.PART if key == b"part" else Kind.TURN, now, counts=False)
    assert order.first(12, lambda _: False) == first, "although it was used later"


def test_nothing_stays_for_ever() -> None:
    """What several conversations began from long ago goes before a turn of late."""
    order = Order()
    order.add(b"shared", Kind.PART, 0, counts=True)
    order.share(b"shared")
    for number in range(9):
        order.add(b"%d" % number, Kind.TURN, 5, counts=True)
    order.add(b"turn", Kind.TURN, 1000, counts=False)
    assert order.kind(b"shared") is Kind.SHARED
    assert order.first(1000, lambda key: key.isdigit()) == b"shared"


def test_old_counts_fade() -> None:
    order = Order()
    for number in range(5000):
        order.add(b"part", Kind.PART, number, counts=True)
        order.remove(b"part")
    for number in range(1000):
        order.add(b"part", Kind.PART, number, counts=True)
        order.share(b"part")
        order.remove(b"part")
    order.add(b"part", Kind.PART, 0, counts=False)
    order.add(b"turn", Kind.TURN, 0, counts=True)  # of turns, half were read
    assert order.first(2, lambda _: False) == b"turn"


@given(st.lists(st.tuples(st.sampled_from("atrsfd"), st.integers(0, 7), st.sampled_from(Kind)), max_size=60))
def test_whatever_happens_all_are_evicted_once(calls: list[tuple[str, int, Kind]]) -> None:
    order, keys = Order(), set[bytes]()
    for now, (call, number, kind) in enumerate(calls):
        key = b"%d" % number
        if call == "a" and key not in keys:
            order.add(key, kind, now, counts=number % 2 == 0)
            keys.add(key)
        elif key in keys:
            if call == "t":
                order.touch(key, now)
            elif call == "r":
                order.count_read(Kind.TURN)
            elif call == "s":
                order.share(key)
            elif call == "f":
                order.evict_first([key])
            elif call == "d":
                order.remove(key)
                keys.discard(key)
        assert order.problems(keys) == [] and (not keys or order.problems(keys | {b"other"}))
    drained(order, len(calls), keys)
