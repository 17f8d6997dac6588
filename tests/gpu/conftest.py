"""GPU tests skip where there is no GPU. The kernels' tests also run in Triton's interpreter (TRITON_INTERPRET=1), or do
nothing but compile kernels (testing/compiled.py)."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from testing.compiled import ASKED

_ASKED = os.environ.get("TRITON_INTERPRET") == "1" or ASKED in os.environ
WITHOUT_GPU = _ASKED and importlib.util.find_spec("triton") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            if WITHOUT_GPU and "kernel_device" in getattr(item, "fixturenames", ()):
                continue
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


@pytest.fixture
def kernel_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
