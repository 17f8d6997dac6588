"""Every kept result says where it comes from and is named by a page; pages have the figures of the results."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from benchmarks.report import pages

ROOT = Path(__file__).parents[2]
FILES = sorted(record.RESULTS.iterdir())
RECORDED_FROM = "2026-11-26"  # since then a run writes whether its tree had changes


def runs(path: Path) -> list[dict[str, Any]]:
    data = json.loads(path.read_text())
    found: list[dict[str, Any]] = data.get("runs", [data])
    return found


def commits(value: Any) -> Iterator[str]:
    """Of a result and of all that is kept in it."""
    if isinstance(value, dict):
        if "commit" in value:
            yield value["commit"]
        value = list(value.values())
    for each in value if isinstance(value, list) else []:
        yield from commits(each)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_result_says_where_it_comes_from(path: Path) -> None:
    for run in runs(path):
        assert list(run)[: len(record.KEYS)] == list(record.KEYS)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", run["date"])
        assert run["hardware"] and run["command"]
        recorded = isinstance(run["dirty"], bool)
        assert recorded or (run["dirty"] == record.NOT_RECORDED and run["date"] < RECORDED_FROM)


def test_their_commits_are_this_repositorys() -> None:
    """Wherever its history is."""
    shallow = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True)
    if shallow.stdout.strip() != "false":
        pytest.skip("no git here, or not all of the history")
    named = sorted({commit for path in FILES for commit in commits(json.loads(path.read_text()))})
    asked = "\n".join(f"{commit}^{{commit}}" for commit in named)
    done = subprocess.run(
        ["git", "cat-file", "--batch-check"], cwd=ROOT, input=asked, capture_output=True, text=True, check=True
    )
    found = dict(zip(named, done.stdout.splitlines(), strict=True))
    assert named and not [commit for commit, line in found.items() if " commit " not in line]


def test_every_result_is_named_by_a_page() -> None:
    text = "\n".join(path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
    assert not [path.name for path in FILES if path.name not in text]


@pytest.mark.parametrize("path", pages.PAGES, ids=lambda path: path.name)
def test_pages_have_the_figures_of_the_results(path: Path) -> None:
    """`python -m benchmarks.report.pages` changes nothing."""
    page = path.read_text()
    assert "<!-- results of" in page and pages.filled(page) == page


@pytest.mark.parametrize(
    ("given", "head", "changed", "commit", "dirty"),
    [
        (None, "abc1234", "", "abc1234", False),
        (None, "abc1234", " M engine/core.py", "abc1234", True),
        (None, "", "", "unknown", record.NOT_RECORDED),
        ("def5678", "", "", "def5678", False),
        ("def5678-dirty", "abc1234", "", "def5678", True),
    ],
)
def test_what_is_written_begins_with_its_origin(
    given: str | None, head: str, changed: str, commit: str, dirty: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    for name in os.environ:
        if name == "OMP_NUM_THREADS" or name.startswith("KTSERVE_"):
            monkeypatch.delenv(name)
    if given:
        monkeypatch.setenv("BENCH_COMMIT", given)
    monkeypatch.setenv("KTSERVE_ISA", "avx2")
    monkeypatch.setattr("sys.orig_argv", ["/bin/python", "-m", "benchmarks.x", "--models", "/a/folder/models"])
    monkeypatch.setattr(record, "_git", lambda *words: head if words[0] == "rev-parse" else changed)
    record.origin.cache_clear()
    record.write(tmp_path / "new" / "x.json", {"rows": [1]})
    record.origin.cache_clear()
    data = json.loads((tmp_path / "new" / "x.json").read_text())
    assert list(data) == [*record.KEYS, "rows"]
    assert (data["commit"], data["dirty"]) == (commit, dirty)
    assert data["command"] == "KTSERVE_ISA=avx2 python -m benchmarks.x --models models"
