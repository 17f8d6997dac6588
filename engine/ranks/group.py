"""What the ranks of a model exchange while they run the same step; with one rank, nothing."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F

from engine.ranks.progress import Progress, Wait

_TIMEOUT_S = 1200  # torch's own, which says nothing of ranks and knows no graphs: `engine.ranks.watch` is much earlier


# Groups of which there may be several in a process, where torch.distributed keeps one for all.
dist: Any = importlib.import_module("torch._C._distributed_c10d")


class Group:
    """One rank alone: every exchange is what it was given. `size` ranks run the same exchanges in the same order."""

    rank: int = 0
    size: int = 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, on every rank; x may be overwritten."""
        return x

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x, on every rank; x may be overwritten."""
        return x

    def gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """[rows, the ranks' parts of width] -> [rows, width], on every rank. Parts are equal, but for the last ones."""
        return x

    def results(self, wait: Callable[[], None]) -> None:
        """`wait` returns when a step has ended, and with it its exchanges."""
        wait()

    def close(self) -> None:
        """No exchange follows."""


ALONE = Group()


class Ranks(Group):
    """Over NCCL between GPUs, and gloo between CPUs, of one machine. `store`: a file that all ranks can reach, and
    nobody else. Nothing is sent before `connect`, which waits for all ranks. Exchanges have no limit of their own: a
    rank's `progress` says where it waits, and `engine.ranks.watch` ends those that wait too long."""

    def __init__(self, device: torch.device, store: str, progress: Progress) -> None:
        self.rank = progress.rank
        self.size = progress.size
        self.progress = progress
        self._device = device
        self._store = store
        self._ranks: Any = None

    def connect(self) -> None:
        self.progress.begin_exchange()
        self._ranks = self._connected()
        met = self.sum(torch.ones(1, device=self._device))  # NCCL connects at the first exchange, never in a graph
        if float(met) != self.size:
            raise RuntimeError(f"{float(met)} of {self.size} ranks have met")

    def _connected(self) -> Any:
        limit, store = timedelta(seconds=_TIMEOUT_S), dist.FileStore(self._store, self.size)
        store.set_timeout(limit)
        if self._device.type == "cuda":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # where ranks first meet: nobody outside is to
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            return dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = limit
        return dist.ProcessGroupGloo(store, self.rank, self.size, options)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        narrow = x.device.type == "cpu" and x.dtype != torch.float32
        y = x.float() if narrow else x.contiguous()
        self._exchange(self._ranks.allreduce, [y], dist.AllreduceOptions())
        return y.to(x.dtype) if narrow else y

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        y = x.contiguous()
        self._exchange(self._ranks.broadcast, [y], options)
        return y

    def gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        rows, each = x.shape[0], -(-width // self.size)
        mine = x if x.shape[1] == each else F.pad(x, (0, each - x.shape[1]))
        parts = x.new_empty(self.size * rows, each)
        self._exchange(self._ranks._allgather_base, parts, mine.contiguous(), dist.AllgatherOptions())
        return parts.view(self.size, rows, each).transpose(0, 1).reshape(rows, self.size * each)[:, :width]

    def results(self, wait: Callable[[], None]) -> None:
        self.progress.begin_wait(Wait.RESULTS)
        try:
            wait()
        finally:
            self.progress.end_wait()

    def close(self) -> None:
        """Graphs with exchanges in them must be gone: NCCL waits for that."""
        if self._ranks is not None and self._device.type == "cuda":
            self._ranks.abort()
        self._ranks = None

    def _exchange(self, start: Callable[..., Any], *what: Any) -> None:
        """The last of `what` are its options. One that fails ends the process: nothing is put right behind it."""
        if hasattr(what[-1], "asyncOp"):
            what[-1].asyncOp = False  # in the current stream's own order, where torch can
        self.progress.begin_exchange()
        work = start(*what)
        if work is not None:  # NCCL returns None for what runs in that order
            work.wait()
        self.progress.end_wait()
