"""What ranks exchange over a group that answers as NCCL's and gloo's do."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.errors import EngineError
from engine.launch.follower import follow
from engine.model.causal_lm import CausalLM
from engine.ranks import group as groups
from engine.ranks.group import Ranks, dist
from engine.ranks.peers import sums
from engine.ranks.peers.sums import PeerSums
from engine.ranks.peers.trial import ROUNDS, adds_exactly
from engine.steps.orders import Step


class Work:
    """Of an exchange that takes place when it is waited for."""

    def __init__(self, exchange) -> None:
        self.wait = exchange


class TwoAlike:
    """Rank 0 of two that have the same. `later`: with works to wait for; else None is returned, all is in order."""

    def __init__(self, later: bool) -> None:
        self.later = later

    def _do(self, exchange) -> Work | None:
        if self.later:
            return Work(exchange)
        exchange()
        return None

    def allreduce(self, tensors, options) -> Work | None:
        return self._do(lambda: tensors[0].mul_(2))

    def broadcast(self, tensors, options) -> Work | None:
        assert (options.rootRank, options.rootTensor) == (0, 0)
        return self._do(lambda: None)

    def _allgather_base(self, out, mine, options) -> Work | None:
        return self._do(lambda: out.copy_(torch.cat([mine, mine])))


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exchanges_end_with_and_without_a_work(dtype, later):
    group = Ranks(0, 2, torch.device("cpu"), "unused")
    group._ranks = TwoAlike(later)
    x = torch.arange(6, dtype=dtype).view(2, 3)
    torch.testing.assert_close(group.sum(x.clone()), 2 * x)
    torch.testing.assert_close(group.from_first(x.clone()), x)
    torch.testing.assert_close(group.gather(x, 5), torch.cat([x, x[:, :2]], 1))
    torch.testing.assert_close(group.sum(x.clone().T), 2 * x.T)


class Peers(PeerSums):
    """Whose ranks meet; sums of theirs are three times what they are given, which no group's are."""

    missed = stopped = False

    def __init__(self, rank, cells) -> None: ...

    def stop(self) -> None:
        self.stopped = True

    def prepare(self) -> None: ...

    def sum(self, x, polls=0):
        return 3 * x


class Meeting:
    def __init__(self, *args) -> None:
        self.closed = False

    def cells(self) -> list[torch.Tensor]:
        return []

    def close(self) -> None:
        self.closed = True


class Nowhere(Meeting):
    def cells(self) -> list[torch.Tensor]:
        raise RuntimeError("no such memory\nat some place")


@pytest.mark.parametrize(
    ("reachable", "meeting", "works", "why"),
    [
        (True, Meeting, True, ""),
        (False, Meeting, True, "not every GPU reaches the others' memory"),
        (True, Nowhere, True, "no such memory"),
        (True, Meeting, False, "a sum over their memory was wrong, or came too late"),
    ],
)
def test_sums_go_over_memory_only_where_that_works(monkeypatch, reachable, meeting, works, why):
    monkeypatch.setattr(groups, "reachable", lambda rank, size: reachable)
    monkeypatch.setattr(groups, "Meeting", meeting)
    monkeypatch.setattr(groups, "PeerSums", Peers)
    monkeypatch.setattr(groups, "adds_exactly", lambda *_: works)
    group = Ranks(0, 2, torch.device("cpu"), "unused", "peers")
    group._ranks = TwoAlike(False)
    how = group._choose_sums(None)
    assert how == (f"NCCL ({why})" if why else "few rows over their memory, others by NCCL")
    some, many = torch.ones(4, 4), torch.ones(257, 1024)
    assert group.sum(some.clone()).eq(2 if why else 3).all()
    assert group.sum(many.clone()).eq(2).all()
    met, peers = group._meeting, group._peers
    group.close()
    assert (met is None or met.closed) and (peers is None or peers.stopped)


def test_memory_of_others_is_not_asked_for_by_default(monkeypatch):
    monkeypatch.setattr(groups, "reachable", lambda rank, size: pytest.fail("other ranks' memory was asked for"))
    group = Ranks(0, 2, torch.device("cpu"), "unused")
    group._ranks = TwoAlike(False)
    assert group._choose_sums(None) == "NCCL"
    assert group.sum(torch.ones(4, 4)).eq(2).all()


def test_a_rank_that_does_not_come_ends_the_step():
    group = Ranks(0, 2, torch.device("cpu"), "unused")
    group.check()
    group._peers = Peers(0, [])
    group.check()
    group._peers.missed = True
    runner: Any = SimpleNamespace(model=SimpleNamespace(group=group))
    step = Step([1] * 7, bytes(8 * 7), b"", padded=True, every=False, greedy=True)
    for way in (group.check, partial(CausalLM.check, runner.model), partial(follow, runner, step)):
        with pytest.raises(EngineError, match="rank 0 of 2 has waited some minutes"):
            way()


def test_ranks_that_cannot_share_memory_leave_nothing(tmp_path: Path):
    """On a CPU torch has no such memory; what comes before, and what a group is told, is the same."""
    store = dist.FileStore(str(tmp_path / "ranks"), 1)
    store.set_timeout(timedelta(seconds=7))
    for _ in range(2):
        meeting = sums.Meeting(f"{tmp_path}/{_}", store, 0, 1, torch.device("cpu"))
        with pytest.raises(RuntimeError, match="cpu"):
            meeting.cells()
        meeting.close()
    assert store.timeout == timedelta(seconds=7)


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_that_share_memory_are_waited_for_with_a_limit(tmp_path: Path, monkeypatch, fails: bool):
    """By torch's store, and where torch itself waits without end, by the end of the process."""
    store = dist.FileStore(str(tmp_path / "ranks"), 1)
    store.set_timeout(timedelta(seconds=7))
    armed: list[bool] = []

    class Memory:
        @staticmethod
        def empty_strided_p2p(size, stride, dtype, device, name) -> torch.Tensor:
            return torch.ones(size, dtype=dtype)

        @staticmethod
        def rendezvous(own: torch.Tensor, name: str) -> Any:
            assert not own.any() and armed == [True] and store.timeout == timedelta(seconds=60)
            if fails:
                raise RuntimeError("no room")
            return SimpleNamespace(get_buffer=lambda rank, size, dtype: torch.full((2,), rank))

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *_, exit, file: armed.append(exit))
    monkeypatch.setattr("faulthandler.cancel_dump_traceback_later", armed.clear)
    meeting = sums.Meeting(str(tmp_path), store, 1, 3, torch.device("cpu"))
    monkeypatch.setattr(sums.dist, "_SymmetricMemory", Memory)
    if fails:
        with pytest.raises(RuntimeError, match="no room"):
            meeting.cells()
    else:
        first, own, last = meeting.cells()
        assert len(own) == PeerSums.size_of(3) and (first == 0).all() and (last == 2).all()
    assert not armed and store.timeout == timedelta(seconds=7)
    meeting.close()


def sum_of_three(spoil: Callable[[int, torch.Tensor], object]) -> Callable[[torch.Tensor], torch.Tensor]:
    """What rank 1 is given, from sums that were recorded of all; `spoil` gets the round's number and its sum."""
    given: list[list[torch.Tensor]] = []
    for rank in range(3):
        given.append([])
        adds_exactly(lambda x, to=given[-1]: to.append(x) or x, rank, 3, torch.device("cpu"))
    rounds = iter(range(len(ROUNDS)))

    def add(x: torch.Tensor) -> torch.Tensor:
        n = next(rounds)
        assert torch.equal(x, given[1][n])
        total = (given[0][n].float() + given[1][n].float() + given[2][n].float()).to(x.dtype)
        spoil(n, total)
        return total

    return add


@pytest.mark.parametrize("wrong", [0, 3, 5, len(ROUNDS) - 1])
def test_a_trial_sees_what_is_wrong_anywhere(wrong: int):
    def tried(spoil: Callable[[torch.Tensor], object]) -> bool:
        add = sum_of_three(lambda n, total: spoil(total) if n == wrong else None)
        return adds_exactly(add, 1, 3, torch.device("cpu"))

    assert tried(lambda total: None)
    assert not tried(lambda total: total[-1:].mul_(2))
    assert not tried(lambda total: total[:2].copy_(total[:2].flip(0)))
    assert not tried(lambda total: total[7:8].fill_(float("nan")))


def test_a_trial_sums_all_blocks_of_both_types_on_both_pages():
    at, seen = [0] * sums.BLOCKS, set()
    for dtype, size in ROUNDS:
        assert sums.PeerSums.takes(torch.empty(size // dtype.itemsize, dtype=dtype))
        for block in range(-(-size // (4 * sums.WORDS))):
            at[block] += 1
            seen.add((block, dtype, at[block] % 2))
    assert len(seen) == sums.BLOCKS * 4


def test_what_is_summed_over_memory():
    assert not PeerSums.takes(torch.empty(9, dtype=torch.bfloat16)[1:])
    assert PeerSums.takes(torch.empty(256, 2048, dtype=torch.bfloat16)) and PeerSums.takes(torch.empty(1))
    assert not PeerSums.takes(torch.empty(257, 2048, dtype=torch.bfloat16))
    assert not PeerSums.takes(torch.empty(3, dtype=torch.bfloat16)) and not PeerSums.takes(torch.empty(0))
    assert not PeerSums.takes(torch.empty(4, dtype=torch.int64))
