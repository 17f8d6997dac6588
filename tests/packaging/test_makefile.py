"""When `make setup` installs again."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import LONGEST

ROOT = Path(__file__).resolve().parents[2]
INSTALLS = "building the CPU kernels"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not here")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Sources that are older than an environment they were installed in."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt", "CMakeLists.txt", "native/src/a.cpp", "engine/lora/a.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    modules = re.search(r"\.modules-\d+", made(tmp_path, "setup", "--print-data-base"))
    assert modules is not None
    times = ("bin/python", ".packages", ".kt", ".gpu", modules[0], ".native")
    for age, name in enumerate(reversed(times)):
        file = tmp_path / ".venv" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.utime(file, (file.stat().st_mtime + 60 - age,) * 2)
    return tmp_path


def made(tree: Path, *arguments: str) -> str:
    """What make would do."""
    command = ["make", "--dry-run", *arguments]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout


def test_quick_tests_can_be_collected_without_torch() -> None:
    line = next(line for line in made(ROOT, "quick").splitlines() if "-p testing.quick" in line)
    files = [word for word in line.split() if word.startswith("tests/")]
    assert len(files) > 20
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "testing.quick", *files]
    command += ["-p", "no:schemathesis", "-p", "no:locust"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_installs_once(tree: Path) -> None:
    assert INSTALLS not in made(tree, "setup")


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: (tree / "engine/lora/a.py").rename(tree / "engine/a.py"),
        lambda tree: (tree / "engine/lora/a.py").unlink(),
        lambda tree: (tree / "engine/lora/b.py").touch(),
    ],
    ids=["moved", "removed", "new"],
)
def test_installs_again_for_other_modules(tree: Path, change: Callable[[Path], object]) -> None:
    change(tree)
    assert INSTALLS in made(tree, "setup")


def test_a_change_of_python_alone_installs_nothing(tree: Path) -> None:
    file = tree / "engine/lora/a.py"
    file.write_text("x = 1\n")
    os.utime(file, (file.stat().st_mtime + 600,) * 2)
    assert INSTALLS not in made(tree, "setup")


def test_the_files_that_come_first_exist() -> None:
    assert [name for name in LONGEST if not (ROOT / "tests" / f"{name}.py").is_file()] == []
