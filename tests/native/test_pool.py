"""The worker pool: every work item once, whatever the threads do."""

from __future__ import annotations

import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from native import _native
from native.topology import cpu_quota, group_nodes, make_pool, numa_nodes, pool_groups, spare_cpus
from testing.waiting import comes_to_rest


@pytest.mark.parametrize("groups", [[[0]], [[0, 1]], [[0, 0, 0], [1, 1]], [[0], [1], [0], [1]]])
def test_every_work_item_runs_once(groups: list[list[int]]) -> None:
    pool = _native.WorkerPool(groups)
    assert pool.threads == sum(map(len, groups))
    assert pool.groups == len(groups)
    assert [pool.group_of(w) for w in range(pool.threads)] == [g for g, cpus in enumerate(groups) for _ in cpus]
    for items in [0, 1, 2, 3, 7, 1000]:
        ran = pool.trace(items)
        assert len(ran) == items
        assert all(0 <= worker < pool.threads for worker in ran)


def test_idle_workers_steal() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})  # workers inherit it
    try:
        pool = _native.WorkerPool([[0, 0, 0, 0]])
        pool.begin_step()
        ran = Counter(pool.trace(400, work_us=100))
        pool.end_step()
    finally:
        os.sched_setaffinity(0, allowed)
    # A range each to begin with; taking turns on one CPU they end at different times, so someone took another's.
    assert sum(ran.values()) == 400
    assert len(ran) > 1
    assert any(count != 100 for count in ran.values())


@pytest.mark.parametrize("cpus", [[0], [0, 1]], ids=len)
def test_jobs_are_recorded_when_asked_for(cpus: list[int]) -> None:
    """Those that the caller works off by itself, too."""
    pool = _native.WorkerPool([cpus])
    pool.trace(10)
    pool.record(True)
    pool.trace(20, work_us=50)
    pool.trace(1, work_us=50)
    pool.trace(7)
    pool.record(False)
    pool.trace(10)
    calls = pool.take_recorded()
    assert [items for items, _, _ in calls] == [20, 1, 7]
    assert calls[0][1] > 0.0
    assert calls[1][1] == calls[1][2] >= 50e-6
    assert calls[0][2] >= 20 * 50e-6
    assert pool.take_recorded() == []


def test_exceptions_reach_the_caller_and_the_pool_lives_on() -> None:
    pool = _native.WorkerPool([[0, 1, 0]])
    for item in [0, 50, 99]:
        with pytest.raises(RuntimeError, match=f"work item {item} failed"):
            pool.trace(100, fail=item)
        assert -1 not in pool.trace(100)


def test_ten_thousand_random_calls_on_several_pools() -> None:
    pools = [_native.WorkerPool([[0, 1]]), _native.WorkerPool([[0, 1, 0]]), _native.WorkerPool([[0], [1]], spin_us=0)]

    def hammer(seed: int) -> int:
        state, calls = seed, 0
        for _ in range(1250):
            state = (state * 1103515245 + 12345) % 2**31
            pool = pools[state % 3]
            items = state // 7 % 40
            if state % 11 == 0:
                pool.begin_step()
            if items and state % 13 == 0:
                with pytest.raises(RuntimeError):
                    pool.trace(items, fail=items - 1)
            else:
                assert -1 not in pool.trace(items)
            if state % 11 == 0:
                pool.end_step()
            calls += 1
        return calls

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(hammer, range(1, 9))) == 10_000


def test_python_runs_meanwhile() -> None:
    pool = _native.WorkerPool([[0, 1]])
    turns = 0
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(pool.trace, 4, work_us=50_000)
        while not call.done():
            turns += 1
            time.sleep(0)
    assert turns > 10


def test_pools_come_and_go() -> None:
    before = len(os.listdir("/proc/self/task"))
    for _ in range(20):
        pool = _native.WorkerPool([[0, 1, 0, 1]])
        pool.begin_step()
        pool.trace(10)
        del pool
    assert len(os.listdir("/proc/self/task")) <= before


def test_an_idle_pool_takes_no_time() -> None:
    pool = _native.WorkerPool([[0, 1]], spin_us=1000)
    pool.trace(10)
    for in_step in (False, True):  # within a step, workers park when nothing has come for spin_us
        if in_step:
            pool.begin_step()
        comes_to_rest()
    pool.end_step()


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="0 CPUs"):
        _native.WorkerPool([])
    with pytest.raises(ValueError, match="without CPUs"):
        _native.WorkerPool([[0], []])
    with pytest.raises(ValueError, match="spin_us"):
        _native.WorkerPool([[0]], spin_us=-1)
    with pytest.raises(ValueError, match="nodes: 1; allowed is one for each of 2 groups"):
        _native.WorkerPool([[0], [1]], nodes=[0])
    pool = _native.WorkerPool([[0]])
    with pytest.raises(RuntimeError, match="end_step without begin_step"):
        pool.end_step()


def test_a_forked_child_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    pool = _native.WorkerPool([[0, 1]])
    pool.trace(4)
    child = os.fork()
    if child == 0:
        try:
            pool.trace(4)
        except RuntimeError as error:
            os._exit(0 if "fork" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert capfd.readouterr().out == ""


def fake_machine(root: Path, nodes: list[str], quota: str | None = None) -> Path:
    for i, cpus in enumerate(nodes):
        folder = root / f"sys/devices/system/node/node{i}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/a/b\n")
    for path in ("a", "a/b"):
        (root / "sys/fs/cgroup" / path).mkdir(parents=True)
        (root / "sys/fs/cgroup" / path / "cpu.max").write_text("max 100000\n")
    if quota:
        (root / "sys/fs/cgroup/a/cpu.max").write_text(quota + "\n")
    return root


def test_groups_follow_the_numa_nodes(tmp_path: Path) -> None:
    root = fake_machine(tmp_path, ["0-3,8-11", "4-7,12-15"])
    cpus = list(range(16))
    assert numa_nodes(cpus, root) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert [len(g) for g in pool_groups(None, cpus, root)] == [7, 7]  # two CPUs stay free
    assert pool_groups(3, cpus, root) == [[0, 1], [4]]
    assert pool_groups(1, cpus, root) == [[0]]
    assert pool_groups(None, [4, 5, 6], root) == [[4, 5, 6]]
    assert pool_groups(4, [0, 4], root) == [[0, 0], [4, 4]]
    assert group_nodes([[0, 1], [4]], root) == [0, 1]
    assert group_nodes(pool_groups(None, [4, 5, 6], root), root) == [1]  # the first group, but not the first node
    assert spare_cpus(None, cpus, root) == [11, 15]
    assert spare_cpus(3, list(range(8)), root) == [2, 3, 5, 6, 7]
    assert spare_cpus(1, [0, 1, 2, 3], root) == []  # so few are not pinned
    assert spare_cpus(16, cpus, root) == []


def test_the_cgroup_limits_the_threads(tmp_path: Path) -> None:
    root = fake_machine(tmp_path, ["0-15"], quota="350000 100000")
    assert cpu_quota(root) == 3
    assert sum(map(len, pool_groups(None, list(range(16)), root))) == 3
    assert cpu_quota(fake_machine(tmp_path / "free", ["0-15"])) is None
    old = fake_machine(tmp_path / "v1", ["0-15"])
    (old / "proc/self/cgroup").write_text("7:memory:/a\n4:cpu,cpuacct:/host/only\n")
    (old / "sys/fs/cgroup/cpu").mkdir()
    for name, text in (("cpu.cfs_quota_us", "200000\n"), ("cpu.cfs_period_us", "100000\n")):
        (old / "sys/fs/cgroup/cpu" / name).write_text(text)
    assert cpu_quota(old) == 2


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    assert pool_groups(None, [2, 3], tmp_path) == [[2, 3]]
    assert group_nodes([[2, 3]], tmp_path) == [-1]
    with pytest.raises(ValueError, match="threads: 0"):
        pool_groups(0, [2, 3], tmp_path)


def test_the_pool_of_this_machine() -> None:
    pool = make_pool(2)
    assert pool.threads == 2 and len(pool.nodes) == pool.groups
    assert _native.WorkerPool([[0], [1]]).nodes == [-1, -1]
    assert _native.WorkerPool([[0], [1]], nodes=[3, 2]).nodes == [3, 2]
    assert -1 not in pool.trace(100)
