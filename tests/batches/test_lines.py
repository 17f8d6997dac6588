"""A file's lines are checked in memory that does not grow with their number."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from api.batches.lines import Checker
from tests.batches.conftest import jsonl, line


def peak_bytes(path: Path, lines: int) -> int:
    """Of memory while a file of so many lines is checked."""
    with path.open("wb") as file:
        for number in range(lines):
            file.write(jsonl(line(f"r{number}")))
    found = 0
    with Checker(path, "/v1/chat/completions", max_body_bytes=2**20, max_lines=lines) as checker:
        checker.some()  # what the first lines need once
        tracemalloc.start()
        try:
            while not checker.at_end:
                found = max(found, len(checker.some()))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert checker.found == lines and not checker.errors and found <= 500
    return peak


def test_memory_does_not_grow_with_the_lines(tmp_path: Path) -> None:
    few, many = (peak_bytes(tmp_path / str(lines), lines) for lines in (2_000, 12_000))
    assert many < 1.5 * few
