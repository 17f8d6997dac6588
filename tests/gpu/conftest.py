"""GPU tests skip where there is no GPU. The kernels' tests also run in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            if INTERPRETED and "kernel_device" in getattr(item, "fixturenames", ()):
                continue
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


@pytest.fixture
def kernel_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
