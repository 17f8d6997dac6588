"""What all tests share: deterministic, bounded property tests; CPUs divided among pytest's workers."""

import os
import sys

import pytest
from hypothesis import settings

settings.register_profile("ktserve", max_examples=40, derandomize=True, deadline=None)
settings.load_profile("ktserve")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Divides the CPUs if any collected file imports torch, which this file must not: `make quick` runs without.

    Where several processes each have a thread for every CPU, threads wait for others that are not running, and a small
    product takes a hundred times as long.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    if workers and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))
