"""The circle check of `make lint`: it finds every circle and nothing else."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testing.import_cycles import circles, main

MODULES = [f"m{i}" for i in range(7)]
GRAPHS = st.fixed_dictionaries({module: st.sets(st.sampled_from(MODULES)) for module in MODULES})


def reaches(imports: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    stack = [start]
    while stack:
        new = imports[stack.pop()] - seen
        seen |= new
        stack += new
    return seen


@given(GRAPHS)
def test_circles_are_real_and_there_are_some_if_a_module_reaches_itself(imports: dict[str, set[str]]) -> None:
    found = circles(imports)
    for circle in found:
        assert circle[0] == circle[-1]
        assert all(after in imports[before] for before, after in itertools.pairwise(circle))
    assert bool(found) == any(module in reaches(imports, module) for module in MODULES)


def test_files_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A circle through two packages, one of its imports inside a function."""
    for package in ("circle_one", "circle_two"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "circle_one" / "a.py").write_text("from circle_two import b\n")
    (tmp_path / "circle_two" / "b.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert main(["circle_one", "circle_two"]) == 0
    (tmp_path / "circle_two" / "b.py").write_text("def f():\n    from circle_one import a\n")
    assert main(["circle_one", "circle_two"]) == 1
    assert "circle_one.a -> circle_two.b -> circle_one.a" in capsys.readouterr().err
