"""Where requests go: what a replica has, spread by load, the same for every router."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.policy import DISK, HOST, SLOT, Affinity, Policy, prefix

IDLE = {"a": 0, "b": 0, "c": 0}
loads = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 50), min_size=1)


def test_an_adapter_stays_where_it_is() -> None:
    policy = Policy(Affinity(slots=1, host=2))
    home = policy.rank(IDLE, "law", ())[0]
    assert Policy(Affinity()).rank(IDLE, "law", ())[0] == home  # another router, which knows nothing
    other = next(name for name in IDLE if name != home)
    policy.sent(other, "law", ())
    assert policy.rank(IDLE, "law", ())[0] == other and policy.tier(other, "law") == SLOT
    policy.sent(other, "med", ())
    assert policy.tier(other, "law") == HOST and policy.rank(IDLE, "law", ())[0] == other
    policy.sent(home, "law", ())
    assert policy.rank(IDLE, "law", ())[0] == home, "a slot before host memory"
    policy.sent(other, "tax", ())
    assert policy.tier(other, "law") == DISK
    policy.keep([other])
    assert policy.tier(home, "law") == DISK and policy.tier(other, "tax") == SLOT


@given(load=loads, slack=st.integers(1, 20), sent=st.lists(st.sampled_from("abcdef")))
def test_no_replica_is_chosen_that_is_beyond_the_slack(load: dict[str, int], slack: int, sent: list[str]) -> None:
    policy = Policy(Affinity(slack=slack))
    blocks = prefix("k", "x" * 2000)
    for replica in sent:
        policy.sent(replica, "hot", blocks)
    for adapter in ("hot", "cold", ""):
        ranked = policy.rank(load, adapter, blocks)
        assert sorted(ranked) == sorted(load)
        assert load[ranked[0]] <= min(load.values()) + slack


def test_a_hot_adapter_spreads_and_cold_ones_stay() -> None:
    policy, load = Policy(Affinity(slack=4)), dict.fromkeys("abcd", 0)
    for _ in range(16):
        replica = policy.rank(load, "hot", ())[0]
        policy.sent(replica, "hot", ())
        load[replica] += 1
    assert max(load.values()) <= 6 and len([n for n in load.values() if n]) >= 3
    calm = Policy(Affinity())
    for number in range(100):
        for _ in range(3):
            calm.sent(calm.rank(dict.fromkeys("abcd", 0), f"cold{number}", ())[0], f"cold{number}", ())
    homes = Counter(sum(calm.tier(replica, f"cold{n}") != DISK for replica in "abcd") for n in range(100))
    assert set(homes) == {1}


def test_the_longest_beginning_wins_then_the_least_load() -> None:
    policy = Policy(Affinity(remembered=8))
    text = "".join(chr(97 + i % 26) for i in range(256 * 4))
    policy.sent("b", "", prefix("key", text[:512]))
    policy.sent("c", "", prefix("key", text))
    assert policy.rank({"a": 0, "b": 1, "c": 2}, "", prefix("key", text)) == ["c", "b", "a"]
    assert policy.rank({"a": 0, "b": 1, "c": 2}, "", prefix("other key", text)) == ["a", "b", "c"]
    assert prefix("key", text[:255]) == [] and len(prefix("key", text * 100)) == 64
    policy.sent("c", "", prefix("key", "y" * 256 * 8))
    assert policy.rank({"a": 3, "b": 1, "c": 2}, "", prefix("key", text))[0] == "b", "the oldest are forgotten"


@pytest.mark.parametrize("wrong", [{"slots": 0}, {"slots": 9, "host": 8}, {"slack": 0}, {"remembered": -1}])
def test_settings_have_ranges(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        Affinity(**wrong)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["told", "sent"]), st.sampled_from("lmnopq"))))
def test_a_report_is_believed_and_what_was_sent_since(steps: list[tuple[str, str, str]]) -> None:
    """Whatever the last reports say, what was sent since the one before the last counts as there."""
    policy = Policy(Affinity(slots=1, host=1))
    reports: dict[str, list[set[str]]] = {}
    for replica, what, adapter in steps:
        if what == "sent":
            policy.sent(replica, adapter, ())
            if replica in reports:
                reports[replica][-1].add(adapter)
        else:
            policy.update_adapters(replica, [adapter], [f"{adapter}-host", adapter])
            reports.setdefault(replica, []).append(set())
        if replica not in reports:
            continue
        lately = set[str]().union(*reports[replica][-2:])
        assert all(policy.tier(replica, name) == SLOT for name in lately)


@pytest.mark.parametrize("told", [["a"], ["b"], ["a", "b", "c"]])
def test_adapters_that_all_began_with_are_spread(told: list[str]) -> None:
    """Asked one after the other, whoever told first that it has them."""
    names, policy = [f"a{i}" for i in range(48)], Policy(Affinity(slots=8, host=64))
    for replica in told:
        policy.update_adapters(replica, (), names)
    homes = {}
    for name in names:
        homes[name] = policy.rank(IDLE, name, ())[0]
        policy.sent(homes[name], name, ())
    assert set(homes.values()) == set(IDLE)
    for replica in IDLE:  # those that told nothing before tell it now, and nothing moves
        policy.update_adapters(replica, [name for name in names if homes[name] == replica], names)
    assert all(policy.rank(IDLE, name, ())[0] == home for name, home in homes.items())


def test_where_adapters_are_decides_and_who_left_is_forgotten() -> None:
    policy = Policy(Affinity())
    policy.sent("a", "law", ())
    policy.update_adapters("a", [], [])
    policy.update_adapters("b", ["med"], ["law"])
    policy.update_adapters("c", ["law"], [])
    assert policy.rank(IDLE, "law", ())[:2] == ["c", "b"], "it has left the replica that it was sent to"
    assert policy.rank(IDLE, "med", ())[0] == "b" and policy.tier("a", "med") == DISK
    policy.sent("a", "med", ())
    assert policy.tier("a", "med") == SLOT, "on its way"
    for tier in (SLOT, DISK):
        policy.update_adapters("a", [], [])
        assert policy.tier("a", "med") == tier
    policy.keep(["a"])
    assert policy.tier("c", "law") == DISK and policy.tier("b", "med") == DISK
