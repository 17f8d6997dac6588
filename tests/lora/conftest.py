"""A reader with its processes, and a good adapter's folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.lora.reader_process import ReaderProcesses
from tests.lora.parse_requests import QUICK, good


@pytest.fixture(scope="module")
def reader() -> Iterator[ReaderProcesses]:
    reader = ReaderProcesses(QUICK)
    yield reader
    reader.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return good(tmp_path / "adapter")
