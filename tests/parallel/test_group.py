"""What ranks exchange over a group that answers as NCCL's and gloo's do."""

from __future__ import annotations

import pytest
import torch

from engine.ranks.group import Ranks
from engine.ranks.progress import Progress


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
    group = Ranks(torch.device("cpu"), "unused", Progress.in_memory(2))
    group._ranks = TwoAlike(later)
    x = torch.arange(6, dtype=dtype).view(2, 3)
    torch.testing.assert_close(group.sum(x.clone()), 2 * x)
    torch.testing.assert_close(group.from_first(x.clone()), x)
    torch.testing.assert_close(group.gather(x, 5), torch.cat([x, x[:, :2]], 1))
    torch.testing.assert_close(group.sum(x.clone().T), 2 * x.T)
