"""A rank that does not come ends its group within a limit, and is named."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.ranks import watch
from engine.ranks.group import Ranks
from engine.ranks.progress import Progress, Stage, Wait
from engine.ranks.watch import Lateness, Limits, Watch
from testing.waiting import PATIENCE_S, eventually
from tests.parallel import forks

# ---- what is concluded, of ranks that are simulated


@dataclass
class Simulated:
    """A rank that runs the same exchanges as all others: `at` are behind it. Before each it computes for one turn."""

    progress: Progress
    at: int = 0

    def turn(self, others: list[Simulated], broadcasts: list[bool]) -> None:
        """`broadcasts`: the exchanges in which rank 0 waits for nobody, and nobody for others than rank 0."""
        own = self.progress.places()[self.progress.rank]
        if own.wait is Wait.NOTHING:
            self.progress.begin_exchange()
            return
        there = [other.progress.places()[other.progress.rank].exchange >= own.exchange for other in others]
        needed = there[:1] if broadcasts[self.at % len(broadcasts)] else there
        if all(needed) or (broadcasts[self.at % len(broadcasts)] and self.progress.rank == 0):
            self.progress.end_wait()
            self.at += 1


def group(size: int) -> list[Simulated]:
    words = Progress.in_memory(size)._words
    ranks = [Simulated(Progress(words, rank)) for rank in range(size)]
    for rank in ranks:
        rank.progress.enter(Stage.SERVING)
    return ranks


LIMITS = Limits(serving_s=10.0, start_s=50.0)


@given(
    st.integers(2, 5),
    st.lists(st.booleans(), max_size=3).map(lambda some: [*some, False]),
    st.integers(0, 60),
    st.sampled_from(["stopped", "hung"]),
    st.data(),
)
def test_the_rank_that_does_not_come_is_named(size, broadcasts, turns, kind, data):
    ranks = group(size)
    late = data.draw(st.integers(0, size - 1), "late")
    views = [Lateness(rank.progress, LIMITS) for rank in ranks]
    for _ in range(turns):
        data.draw(st.sampled_from(ranks)).turn(ranks, broadcasts)
    while kind == "hung" and ranks[late].progress.places()[late].wait is not Wait.NOTHING:
        for rank in ranks:  # it hangs where it computes
            rank.turn(ranks, broadcasts)
    others = [rank for rank in ranks if rank.progress.rank != late]
    said: dict[int, str] = {}
    for _ in range(40):
        for rank in others if kind == "stopped" else ranks:
            rank.progress.beat()
        for rank in others:
            rank.turn(ranks, broadcasts)
        found = {view._progress.rank: view.look(1.0) for view in views if kind == "hung" or view._progress.rank != late}
        said = {rank: why for rank, why in found.items() if why}
        if said:
            break
    (judge,) = said
    assert judge == (1 if kind == "stopped" and late == 0 else 0)
    assert f"rank {late} of {size}{' has' if kind == 'stopped' else ', which'}" in said[judge], said[judge]
    assert "10 s" in said[judge] and all(f"rank {rank}: serving, step 0" in said[judge] for rank in range(size))


def looks(view: Lateness, times: int, ranks: list[Simulated], do: Callable[[], object] = lambda: None) -> list[str]:
    said = []
    for _ in range(times):
        for rank in ranks:
            rank.progress.beat()
        do()
        said.append(view.look(1.0))
    return said


def test_idle_ranks_and_those_that_go_on_are_left_alone():
    ranks = group(2)
    view = Lateness(ranks[0].progress, LIMITS)
    ranks[1].progress.begin_wait(Wait.STEP)
    assert not any(looks(view, 50, ranks))
    ranks[0].progress.begin_wait(Wait.RESULTS)
    assert not any(looks(view, 50, ranks, ranks[1].progress.begin_step))


def test_a_start_may_take_longer():
    ranks = group(2)
    ranks[1].progress.enter(Stage.LOADING)
    ranks[0].progress.enter(Stage.LOADING)
    ranks[0].progress.begin_wait(Wait.OTHERS)
    view = Lateness(ranks[0].progress, LIMITS)
    assert not any(looks(view, 100, ranks, ranks[1].progress.loaded_part))
    said = looks(view, 51, ranks)
    assert not any(said[:49])
    assert "the other ranks have waited 50 s for rank 1 of 2, which has not come" in next(filter(None, said))
    assert "rank 1: loading, 100 parts are loaded, computing" in said[-1]


def test_a_process_that_never_starts_is_named():
    ranks = group(3)
    ranks[2].progress.enter(Stage.STARTING)
    said = looks(Lateness(ranks[0].progress, LIMITS), 50, ranks[:2])
    assert said[-1].startswith("rank 2 of 3 has given no sign of life for 50 s (") and not any(said[:-1])
    assert said[-1].endswith("rank 2: its process starts)")


def test_gpus_that_do_not_end_an_exchange_are_not_blamed_one_by_one():
    """Hosts have launched the step and wait: which GPU did not come is not known."""
    ranks = group(2)
    for rank in ranks:
        rank.progress.begin_step()
    ranks[0].progress.begin_wait(Wait.RESULTS)
    ranks[1].progress.begin_wait(Wait.STEP)
    view = Lateness(ranks[0].progress, LIMITS)
    assert "all 2 ranks have waited 10 s for an exchange that has not ended" in looks(view, 11, ranks)[-1]
    ranks[0].progress.begin_step()  # of which rank 1 does not take notice
    assert "for rank 1 of 2, which has not come" in looks(view, 12, ranks)[-1]


# ---- processes over gloo

SHORT, SHORT_BEAT_S = Limits(3.0, 4.0), 0.2  # less, and a busy machine's threads seem silent


def run_rank(rank: int, folder: Path, hangs_at: int | None, out: Connection) -> None:
    """A rank that does nothing but exchange; says why the group ends, if it is the one that ends it."""
    watch.BEAT_S = SHORT_BEAT_S
    torch.set_num_threads(1)
    progress = Progress.open(folder / "progress", rank)

    def end(why: str) -> None:
        out.send(why)
        os._exit(1)

    Watch(progress, SHORT, end)
    ranks = Ranks(torch.device("cpu"), str(folder / "ranks"), progress)
    progress.enter(Stage.CONNECTING)
    if hangs_at == -1:
        threading.Event().wait()
    ranks.connect()
    progress.enter(Stage.SERVING)
    x = torch.ones(4, 6)
    for n in range(1 << 30):
        if n == hangs_at:
            threading.Event().wait()
        ranks.from_first(x)
        ranks.sum(x.clone())
        ranks.gather(x, 6 * ranks.size)
        time.sleep(0.001)


class Group:
    """Processes that exchange; ended when the test is."""

    def __init__(self, folder: Path, size: int, hangs: int | None = None, hangs_at: int | None = None) -> None:
        folder.mkdir(parents=True)
        self.progress = Progress.create(folder / "progress", size)
        self.processes: list[Any] = []
        self.ends: list[Connection] = []
        for rank in range(size):
            ours, theirs = forks._forks.Pipe(duplex=False)
            at = hangs_at if rank == hangs else None
            self.processes.append(forks._forks.Process(target=run_rank, args=(rank, folder, at, theirs), daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.ends.append(ours)

    def stages(self) -> list[Stage]:
        return [place.stage for place in self.progress.places()]

    def send(self, number: signal.Signals, ranks: list[int]) -> None:
        for rank in ranks:
            os.kill(self.processes[rank].pid, number)

    def said(self, timeout_s: float) -> list[str]:
        """By those that end it, within that time. Others end with them, and say nothing."""
        deadline, said, open = time.monotonic() + timeout_s, [], list(self.ends)
        while open and not said and (ready := wait(open, max(0.0, deadline - time.monotonic()))):
            for end in ready:
                try:
                    said.append(end.recv())
                except EOFError:
                    open.remove(end)
        return said

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    made: list[Group] = []
    yield made
    for each in made:
        each.close()


@dataclass(frozen=True)
class Case:
    """A group of which a rank is stopped so long after its start, or hangs at an exchange
    (-1: before it connects)."""

    size: int
    late: int
    after_s: float
    hangs_at: int | None


def cases() -> st.SearchStrategy[Case]:
    def of(size: int) -> st.SearchStrategy[Case]:
        late, after_s = st.integers(0, size - 1), st.floats(0.0, 1.5)
        return st.builds(Case, st.just(size), late, after_s, st.none() | st.integers(-1, 200))

    return st.integers(2, 3).flatmap(of)


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(made=st.lists(cases(), min_size=4, max_size=4))
def test_whichever_rank_does_not_come_ends_its_group(tmp_path_factory, made: list[Case]):
    """Groups at a time, each with a rank that is late, from while they connect on."""
    folder, groups = tmp_path_factory.mktemp("groups"), []
    try:
        for i, case in enumerate(made):
            late = case.late if case.hangs_at is not None else None
            groups.append(Group(folder / str(i), case.size, late, case.hangs_at))
        for each in groups:
            eventually(lambda each=each: all(place.beats for place in each.progress.places()), "a rank is not there")
        began = time.monotonic()
        for case, each in sorted(zip(made, groups, strict=True), key=lambda pair: pair[0].after_s):
            if case.hangs_at is None:
                time.sleep(max(0.0, began + case.after_s - time.monotonic()))
                each.send(signal.SIGSTOP, [case.late])
        for case, each in zip(made, groups, strict=True):
            said = each.said(PATIENCE_S)
            assert len(said) == 1 and f"rank {case.late} of {case.size}" in said[0], (case, said)
    finally:
        for each in groups:
            each.close()


def test_ranks_that_were_all_stopped_go_on(tmp_path, groups):
    """A machine that sleeps, a container that is paused: longer than the limit, and nobody is late."""
    groups.append(Group(tmp_path / "g", 2))
    eventually(lambda: groups[0].stages() == [Stage.SERVING] * 2, "ranks do not serve")
    groups[0].send(signal.SIGSTOP, [0, 1])
    time.sleep(SHORT.serving_s + 1)
    before = groups[0].progress.places()[0].exchange
    groups[0].send(signal.SIGCONT, [1, 0])
    eventually(lambda: groups[0].progress.places()[0].exchange > before + 10, "ranks do not go on")
    assert groups[0].said(4 * SHORT_BEAT_S) == []
