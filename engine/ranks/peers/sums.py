"""Sums of a step's few rows over the memory of the other ranks' GPUs, where these can reach one another."""

from __future__ import annotations

import faulthandler
import importlib
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

dist: Any = importlib.import_module("torch._C._distributed_c10d")

BLOCKS = 256  # at most, of 4 KiB each: more is faster over NCCL
WORDS = 1024  # of a block
POLLS = 1 << 29  # some minutes
TRIAL_POLLS = 1 << 22  # some seconds
_MEETING_S = 60  # for all ranks to share their memory: well within the time-out of what is exchanged after it


class PeerSums:
    """`cells`: each rank's memory as it is seen from here, `size_of` many int64, 0 at first. One stream at a time."""

    def __init__(self, rank: int, cells: Sequence[torch.Tensor]) -> None:
        self._kernels: Any = importlib.import_module("engine.ranks.peers.kernels")
        self._rank, self._cells = rank, list(cells)
        device = cells[rank].device
        self._table = torch.tensor([each.data_ptr() for each in cells], dtype=torch.int64, device=device)
        self._counts = torch.zeros(BLOCKS, dtype=torch.int32, device=device)
        self._missed = torch.zeros(1, dtype=torch.int32, device=device)
        self._told = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")  # the same, for the host
        self._seen = self._told.numpy()

    @staticmethod
    def size_of(ranks: int) -> int:
        """Cells of a rank: two pages of what each rank sends."""
        return 2 * ranks * BLOCKS * WORDS

    @staticmethod
    def bytes_of(ranks: int) -> int:
        """What these take of a rank's GPU."""
        return PeerSums.size_of(ranks) * torch.int64.itemsize

    @staticmethod
    def takes(x: torch.Tensor) -> bool:
        """Whether x is summed here; the same on all ranks."""
        fits = x.dtype in (torch.float32, torch.bfloat16) and 0 < x.nbytes <= 4 * WORDS * BLOCKS
        return fits and x.nbytes % 4 == 0 and x.storage_offset() * x.itemsize % 4 == 0

    @property
    def missed(self) -> bool:
        """Whether a rank has not come to a sum in time, as of the kernels that have ended."""
        return bool(self._seen[0])

    def sum(self, x: torch.Tensor, polls: int = POLLS) -> torch.Tensor:
        """All ranks' sum, in place; x is contiguous. NaN if a rank has not come after so many looks."""
        words = x.view(-1).view(torch.int32)
        self._run(words, len(words), x.dtype == torch.float32, polls)
        return x

    def stop(self) -> None:
        """Ends sums that wait for other ranks; none follows."""
        self._seen[0] = 1

    def prepare(self) -> None:
        """Compile; no rank is waited for."""
        for wide in (False, True):
            self._run(self._counts, 0, wide, 0)

    def _run(self, words: torch.Tensor, count: int, wide: bool, polls: int) -> None:
        self._kernels.sum_kernel[(max(1, -(-count // WORDS)),)](
            words, self._table, self._counts, self._missed, self._told, count, polls,
            RANK=self._rank, SIZE=len(self._cells), CAPACITY=BLOCKS * WORDS, BLOCK=WORDS, WIDE=wide, num_warps=8,
        )  # fmt: skip


class Meeting:
    """Memory that all ranks of a machine can write to. torch finds its ranks by the name of a process group that is
    registered, here one that exchanges nothing else; `store` is theirs."""

    def __init__(self, name: str, store: Any, rank: int, size: int, device: torch.device) -> None:
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # not every host lets NVLink use it
        self._name, self._size, self._device, self._rank, self._store = name, size, device, rank, store
        ours = dist.PrefixStore("peers", store)
        self._group = dist.ProcessGroup(ours, rank, size)
        self._group._set_group_name(name)
        dist._register_process_group(name, self._group)
        dist._SymmetricMemory.set_group_info(name, rank, size, ours)
        self._held: list[Any] = []

    def cells(self) -> list[torch.Tensor]:
        """int64, of each rank. Waits a minute for all of them; RuntimeError where memory cannot be shared. Ends the
        process where torch waits longer, for a rank that has begun and not gone on."""
        memory, count = dist._SymmetricMemory, PeerSums.size_of(self._size)
        own = memory.empty_strided_p2p([count], [1], torch.int64, self._device, self._name)
        own.zero_()
        torch.cuda.synchronize(self._device)
        usual = self._store.timeout
        self._store.set_timeout(timedelta(seconds=_MEETING_S))
        # torch keeps the interpreter's lock meanwhile: no thread of ours could end a process that waits for a dead rank
        faulthandler.dump_traceback_later(2 * _MEETING_S, exit=True, file=2)
        try:
            seen = memory.rendezvous(own, self._name)
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._store.set_timeout(usual)
        self._held = [own, seen]
        each = [seen.get_buffer(rank, [count], torch.int64) for rank in range(self._size)]
        return [own if rank == self._rank else cells for rank, cells in enumerate(each)]

    def close(self) -> None:
        """No sum follows."""
        self._held = []
        dist._unregister_process_group(self._name)


def reachable(rank: int, size: int) -> bool:
    """Whether this rank's GPU can write to all the others'."""
    return all(torch.cuda.can_device_access_peer(rank, other) for other in range(size) if other != rank)
