"""Every benchmark is imported and says what it takes; what documents and docstrings name of it is among that."""

from __future__ import annotations

import pkgutil
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import benchmarks
from benchmarks.gpu.run import PARTS

ROOT = Path(benchmarks.__path__[0]).parent
SOURCES = {
    found.name: ROOT.joinpath(*found.name.split(".")).with_suffix(".py").read_text()
    for found in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")
    if not found.ispkg
}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
PAGES = "\n".join(path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
# Commands of kept results are those of their commits.
DOCUMENTS = re.sub(r"<!-- results of (\S+): begin -->.*?<!-- results of \1: end -->", "", PAGES, flags=re.DOTALL)


def named(name: str) -> set[str]:
    """Flags that follow `python -m NAME` in a document or in the docstring, or come from the GPU's benchmarks."""
    text = DOCUMENTS + SOURCES[name].split('"""')[1]
    text += "".join(f"\npython -m benchmarks.{p.module} {p.flags} {p.quick}\n" for p in PARTS.values())
    calls = re.findall(rf"python -m {re.escape(name)}((?: [^`#\n\\]+|\\\n)*(?:\n {{8,}}\[[^`#\n]*)*)", text)
    return {flag for call in calls for flag in FLAG.findall(re.sub(r'(?<==)("[^"]*"|\S*)', "", call))}


@pytest.mark.parametrize("name", SOURCES)
def test_it_says_what_it_takes(name: str, capsys: Any, monkeypatch: Any) -> None:
    if "__main__" not in SOURCES[name]:
        __import__(name)
        return
    if "\nimport tinker\n" in SOURCES[name]:
        pytest.importorskip("tinker", reason="Tinker's client is installed by make test-clients")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as end:
        runpy.run_module(name, run_name="__main__")
    assert not end.value.code
    assert named(name) <= set(FLAG.findall(capsys.readouterr().out))


def test_flags_are_found_where_they_are_named() -> None:
    assert {"--layers", "--share", "--dry", "--serve", "--out"} <= named("benchmarks.gpu.hybrid")
    assert {"--types", "--placements", "--quick"} <= named("benchmarks.gpu.llamacpp")
