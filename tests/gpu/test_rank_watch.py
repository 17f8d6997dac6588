"""A rank beside a GPU that stops in the middle of decode graphs ends the engine, which says so."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from engine.messages import Ready
from testing.processes import gone
from testing.waiting import eventually
from tests.gpu.test_tensor_parallel import GPU, SHAPE, quick_rules
from tests.parallel.engines import Engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one rank on each of two GPUs"),
]


@pytest.fixture
def engines(monkeypatch) -> Iterator[list[Engine]]:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")  # not every host that lends GPUs lets NVLink use it
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_stopped_ends_all(tmp_path, engines, late):
    """Rank 0 waits for a graph on its GPU that waits for the other's."""
    shape = SHAPE | {"moe_intermediate_size": 64}
    engines.append(Engine(tmp_path, 2, 8, 500, shape, **GPU, rules=quick_rules(tmp_path, "gpu"), max_num_seqs=2))
    engines[0].until(Ready, 500)
    ranks = engines[0].pids()
    engines[0].submit()
    os.kill(ranks[late], signal.SIGSTOP)
    status, said = engines[0].ended()
    assert status == (1 if late else -signal.SIGKILL), said
    assert f"engine: rank {late} of 2 has given no sign of life for 8 s (rank 0: serving, step " in said, said
    eventually(lambda: all(map(gone, ranks)), "a rank is left")
