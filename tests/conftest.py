"""What all tests share: deterministic, bounded property tests; the longest files come first; CPUs divided among
pytest's workers; a garbage collector that does not look at all tests again and again."""

import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("ktserve", max_examples=40, derandomize=True, deadline=None)
settings.load_profile("ktserve")

# Files of more than half a minute, the longest first: one that a process begins last is waited for by the others.
LONGEST = (
    "packaging/test_installed", "kt/test_kt", "lora/test_reader_process", "hub/test_fetch", "parallel/test_ends",
    "parallel/test_delta_ranks", "page/test_real_server", "engine/test_bounded", "engine/test_mtp", "api/test_bodies",
    "parallel/test_ranks", "page/test_playground", "tuning/test_jobs", "batches/test_killed", "e2e/test_families",
    "native/test_latent", "engine/test_native_formats", "engine/test_parity", "parallel/test_watch",
    "tuning/test_killed",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Modules and tests stay: to look for garbage among them takes a quarter of the time that they take to load."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    places = {folder / f"{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Divides the CPUs if any collected file imports torch, which this file must not: `make quick` runs without.

    Where several processes each have a thread for every CPU, threads wait for others that are not running, and a small
    product takes a hundred times as long.
    """
    gc.freeze()  # a full collection would look at a million objects, for half a second
    gc.enable()
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    if workers and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))
