"""What is sent follows from the seed; what was seen is judged as the limits say. Runs without locust's patches."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.chaos.watch import Held
from loadtests.load.limits import Limit
from loadtests.load.records import Answer, Stage
from loadtests.load.traffic import ARRIVALS, Traffic, length, text, zipf
from loadtests.load.watch import grown, held_table
from loadtests.report.html import page


@given(seed=st.integers(0, 2**31), words=st.integers(1, 400))
def test_text_and_lengths_are_of_the_seed(seed: int, words: int) -> None:
    drawn = [text(random.Random(seed), words) for _ in range(2)]
    assert drawn[0] == drawn[1] and len(drawn[0].split()) == words
    assert 1 <= length(random.Random(seed), words, 2 * words) <= 2 * words
    assert 0 <= zipf(random.Random(seed), words) < words


def test_traffic_reaches_workers_whole() -> None:
    traffic = Traffic(seed=7, arrival="bursts", rate=2.5, models=["a", "b"], keys={"": "k"}, adapter_path="/x")
    assert Traffic.of(type("Options", (), {"load": traffic.row()})()) == traffic  # type: ignore[arg-type]
    assert Traffic.of(None) == Traffic()


@pytest.mark.parametrize("arrival", ARRIVALS[1:])
def test_open_arrivals_keep_their_rate(arrival: str) -> None:
    traffic, rng, now = Traffic(arrival=arrival, rate=5.0), random.Random(1), 3.0
    at = []
    while now < 2003:
        now += traffic.gap_s(rng, now)
        at.append(now)
    assert len(at) == pytest.approx(5.0 * 2000, rel=0.05)
    in_burst = sum(time % 10 < 2 for time in at) / len(at)
    assert in_burst == pytest.approx(0.8 if arrival == "bursts" else 0.2, abs=0.02)


def test_lengths_have_their_median() -> None:
    rng = random.Random(0)
    drawn = [length(rng, 40, 10_000) for _ in range(4000)]
    assert statistics.median(drawn) == pytest.approx(40, rel=0.06) and max(drawn) > 200


def answer(group: str = "a", ttft_s: float = 0.1, gaps_s: tuple[float, ...] = (0.02,) * 9, **more: object) -> Answer:
    return Answer(group, 100.0, ttft_s + sum(gaps_s), ttft_s, list(gaps_s), 5, 10, **more)  # type: ignore[arg-type]


def test_limits_are_missed_by_what_is_beyond_them() -> None:
    slow = [answer("slow", 1.0) for _ in range(5)]
    stage = Stage("4 users", 100.0, 10.0, [*[answer() for _ in range(95)], *slow, answer(outcome="OSError: x")])
    for kept in ("ttft.p90=100", "itl.p99=20.1", "ttft.p99/slow=1000", "errors=0.01", "tokens_s=100", "errors/slow=0"):
        assert Limit.parse(kept).broken(stage) is None, kept
    for missed in ("ttft.p99=900", "itl.p50=19", "e2e.p50/slow=1000", "errors=0.009", "tokens_s=102", "errors/b=1"):
        assert Limit.parse(missed).broken(stage) is not None, missed
    assert Limit.parse("ttft.p50=1").broken(Stage("", 0.0, 1.0, [Answer("a", 0.0, outcome="x")])) is not None  # nan
    refused = Stage("", 0.0, 1.0, [answer(outcome="refused"), answer(outcome="hung up")])
    assert Limit.parse("errors=0").broken(refused) is None


def test_concurrency_is_littles() -> None:
    assert Stage("", 0.0, 2.8, [answer() for _ in range(10)]).concurrency == pytest.approx(1.0)


def held(**more: float) -> Held:
    rest = {"running": 0.0, "waiting": 0.0, "blocks_used": 0.0, "slots_used": 0.0, "metrics_kib": 30.0}
    return Held(**{"api_mib": 100.0, "engine_mib": 500.0, "files": 60, "threads": 30, **rest, **more})  # type: ignore[arg-type]


def test_what_grew_is_said() -> None:
    busy = [held(running=8, blocks_used=90, api_mib=100 + i) for i in range(9)]
    assert grown([*busy, held()]) == []
    for name, value in {"api_mib": 400, "engine_mib": 900, "files": 100, "threads": 60, "blocks_used": 1}.items():
        (line,) = grown([*busy, held(**{name: value})])
        assert line.startswith(name)
    assert "4 are needed" in grown(busy[:2])[0]


def test_the_page_shows_all_and_escapes_names() -> None:
    stages = [Stage(f"{n} users", 100.0, 10.0, [answer("<b>"), answer("t2", outcome="OSError: y")]) for n in (1, 8)]
    shown = page("chat & more", stages, ["8 users: errors is 0.5, at most 0"], [(101.0, held()), (102.0, held())])
    assert "Throughput against concurrency" in shown and "errors is 0.5" in shown and "engine_mib" in shown
    assert "&lt;b&gt;" in shown and "<b>" not in shown
    setting = page("chat", stages, [], setting={"began": "2026-01-01", "server": "http://<x>"})
    assert "2026-01-01" in setting and "http://&lt;x&gt;" in setting
    empty = page("none", [Stage("1 users", 0.0, 1.0, [])], [])
    assert "All limits were kept" in empty


def test_what_was_held_is_a_table_of_a_few_moments() -> None:
    seen = [(1000.0 + 60.0 * i, held(api_mib=100.4 + i)) for i in range(31)]
    lines = held_table(seen)
    assert lines[0].startswith("| minute | api_mib | engine_mib | files |") and len(lines) == 2 + 7
    assert [line.split("|")[1:3] for line in (lines[2], lines[-1])] == [[" 0.0 ", " 100 "], [" 30.0 ", " 130 "]]
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    assert len(held_table(seen[:1])) == 3 and held_table([]) == []
