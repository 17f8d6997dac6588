"""What documents and comments say of this repository: files that they name are there, layers are the linter's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from importlinter.api import read_configuration

ROOT = Path(__file__).parents[2]
CONFIGURATION = read_configuration(str(ROOT / "pyproject.toml"))
PACKAGES = CONFIGURATION["session_options"]["root_packages"]
FOLDERS = [*PACKAGES, "docs", "tests"]
SOURCES = ("py", "cpp", "hpp")
SKIPPED = {"__pycache__", "node_modules", "results", "build"}
OTHERS = {"llama.cpp", "kt-kernel/python/utils/loader.py"}  # of other projects
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
# `engine/core.py`, `native/src`, `tests/engine/test_kv_*.py`: from the root. `format.hpp`, `gemm/*_amx.cpp`: any such.
FROM_ROOT = re.compile(rf"(?<![\w/.~{{}}$-])(?:{'|'.join(FOLDERS)})/[\w./*-]*")
SOURCE = re.compile(rf"(?<![\w/.~{{}}$<-])[\w*][\w./*-]*\.(?:{'|'.join(SOURCES)})\b")


def files(*kinds: str) -> list[Path]:
    """Source files of our packages and tests, as paths from the root."""
    found = [
        path.relative_to(ROOT) for folder in FOLDERS for kind in kinds for path in (ROOT / folder).rglob(f"*.{kind}")
    ]
    return [path for path in found if not SKIPPED & set(path.parts)]


CODE = files(*SOURCES)
INCLUDED_FROM = [ROOT, ROOT / "native" / "src"]


def there(name: str) -> bool:
    """`*` and words in capitals (NAME) stand for anything."""
    name = name.rstrip("./")
    if any((root / name).exists() for root in INCLUDED_FROM):
        return True
    pattern = re.sub(r"(?<![A-Za-z])[A-Z]{2,}(?![A-Za-z])", "*", name)
    if "*" in pattern and any(next(root.glob(pattern), None) for root in INCLUDED_FROM):
        return True
    return name.partition("/")[0] not in FOLDERS and any(path.match(pattern) for path in CODE)


def named(text: str) -> set[str]:
    """Files and folders of this repository that backticks of a document name."""
    marked = re.findall(r"`([^`]+)`", text)
    return {name for each in marked for pattern in (FROM_ROOT, SOURCE) for name in pattern.findall(each)} - OTHERS


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_a_document_names_are_there(document: Path) -> None:
    text = document.read_text()
    assert not [name for name in sorted(named(text)) if not there(name)]
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert not [link for link in links if not (document.parent / link).exists()]


def test_files_that_code_names_are_there() -> None:
    """By their paths from the root, in comments and elsewhere. Tests name files of trees that they make."""
    missing = {}
    for path in CODE:
        if path.parts[0] == "tests":
            continue
        names = {name for name in FROM_ROOT.findall((ROOT / path).read_text()) if not there(name)}
        if names:
            missing[str(path)] = names
    assert not missing


def test_names_are_found() -> None:
    text = (
        "`engine/core.py` and `python -m x OUT=benchmarks/results/cpu-NAME.json`, `format.hpp` (`llama.cpp`, `/api/x`)"
    )
    assert named(text) == {"engine/core.py", "benchmarks/results/cpu-NAME.json", "format.hpp"}
    present = ["engine/core.py", "benchmarks/results/cpu-NAME.json", "format.hpp", "gemm/*_amx.cpp", "gemm/rows.hpp"]
    absent = ["engine/process.py", "benchmarks/results/none-NAME.json", "formats.hpp", "gemm/none*.cpp", "api/plan.py"]
    assert [there(name) for name in present] == [True] * 5 and [there(name) for name in absent] == [False] * 5


def rows(section: str) -> list[list[str]]:
    """Of the section's table in docs/architecture.md, without its head."""
    text = (ROOT / "docs" / "architecture.md").read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def layers(name: str) -> list[list[str]]:
    """Of a contract in pyproject.toml, from above."""
    (contract,) = [each for each in CONFIGURATION["contracts_options"] if each["name"] == name]
    return [re.split(r"\s*[|:]\s*", layer) for layer in contract["layers"]]


def test_the_layers_of_the_engine_are_the_linters() -> None:
    told = [re.findall(r"`(\w+)`", row[0]) for row in rows("Layers of the engine")]
    assert [sorted(row) for row in told] == [sorted(layer) for layer in layers("the engine's folders import downwards")]


def test_the_folders_are_the_linters_and_import_what_is_told() -> None:
    table = {re.findall(r"`([\w/.]+)`", row[0])[0].rstrip("/"): row[-1] for row in rows("Folders")}
    modules = [name.removesuffix(".py").replace("/", ".") for name in table]
    contract = layers("packages import downwards")
    height = {module: number for number, layer in enumerate(contract) for module in layer}
    assert set(modules) == set(height) and modules == sorted(modules, key=lambda module: height[module])
    imported = re.compile(rf"^\s*(?:from|import) ({'|'.join(PACKAGES)})\b", re.MULTILINE)
    for name, told in table.items():
        inside = [
            path for path in CODE if path.suffix == ".py" and (str(path) == name or str(path).startswith(f"{name}/"))
        ]
        found = {package for path in inside for package in imported.findall((ROOT / path).read_text())}
        assert found - {name} == {each.partition(".")[0] for each in re.findall(r"`([\w.]+)`", told)}, name
