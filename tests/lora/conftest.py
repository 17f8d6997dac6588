"""A reader with its processes, and a good adapter's folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.lora.reading.process import AdapterReader
from tests.lora.reading import QUICK, good


@pytest.fixture(scope="module")
def reader() -> Iterator[AdapterReader]:
    reader = AdapterReader(QUICK)
    yield reader
    reader.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return good(tmp_path / "adapter")
