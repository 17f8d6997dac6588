"""What ranks exchange over a group that answers as NCCL's and gloo's do."""

from __future__ import annotations

import pytest
import torch

from engine.parallel import group as groups
from engine.parallel.group import Ranks
from engine.parallel.peers.sums import PeerSums


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

    def __init__(self, rank, cells, works=True) -> None:
        self._works = works

    def prepare(self) -> None: ...

    def works(self) -> bool:
        return self._works

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
        (True, Meeting, False, "a sum over their memory was wrong"),
    ],
)
def test_sums_go_over_memory_only_where_that_works(monkeypatch, reachable, meeting, works, why):
    monkeypatch.setattr(groups, "reachable", lambda rank, size: reachable)
    monkeypatch.setattr(groups, "Meeting", meeting)
    monkeypatch.setattr(groups, "PeerSums", lambda rank, cells: Peers(rank, cells, works))
    group = Ranks(0, 2, torch.device("cpu"), "unused")
    group._ranks = TwoAlike(False)
    assert group._meet_peers(None) == why
    some, many = torch.ones(4, 4), torch.ones(257, 1024)
    assert group.sum(some.clone()).eq(2 if why else 3).all()
    assert group.sum(many.clone()).eq(2).all()
    met = group._meeting
    group.close()
    assert met is None or met.closed


def test_what_is_summed_over_memory():
    assert PeerSums.takes(torch.empty(256, 2048, dtype=torch.bfloat16)) and PeerSums.takes(torch.empty(1))
    assert not PeerSums.takes(torch.empty(257, 2048, dtype=torch.bfloat16))
    assert not PeerSums.takes(torch.empty(3, dtype=torch.bfloat16)) and not PeerSums.takes(torch.empty(0))
    assert not PeerSums.takes(torch.empty(4, dtype=torch.int64))
