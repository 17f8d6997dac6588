"""Whatever interpreter we start, the working directory is not searched: not with Python 3.10 either, which has no
switch against it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.lora.reader_process import ParseRequest, ReaderProcesses
from ktserve.launcher import program
from testing.waiting import PATIENCE_S
from tests.lora import make

ROOT = Path(__file__).resolve().parents[2]
SERVED = ("api", "engine", "scheduler", "native", "rules", "ktserve", "loadtests")
DECOY = "import os; os.write(2, b'a module of the working directory was imported\\n'); os._exit(77)\n"
STARTERS = {"executable", "get_context", "ProcessPoolExecutor", "runpy", "forkserver", "set_executable"}
HIDDEN = ("PYTHONSAFEPATH", "PYTHONPATH")


def starts(folder: Path) -> Iterator[str]:
    """Files that name the interpreter, or what starts one."""
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in STARTERS and "asyncio" not in ast.unparse(node):
                yield str(file.relative_to(ROOT))


def test_every_start_goes_through_one_function() -> None:
    assert {place for name in SERVED for place in starts(ROOT / name)} == {"ktserve/launcher.py"}


@pytest.fixture
def decoys(tmp_path: Path) -> Path:
    """A folder in which any module that is imported from it ends the process."""
    folder = tmp_path / "here"
    folder.mkdir()
    for name in {*SERVED, *sys.stdlib_module_names, "torch", "numpy", "msgspec", "zmq", "tokenizers"}:
        (folder / f"{name}.py").write_text(DECOY)
    return folder


def test_reader_processes(decoys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started by an engine that runs where the command was typed."""
    weights = make.random_adapter(make.model_config())
    folder = make.write(tmp_path / "adapter", make.per_expert_keys(weights), make.lora_config())
    for name in HIDDEN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(decoys)
    reader = ReaderProcesses()
    assert reader.parse(ParseRequest(str(folder), "x", make.model_config())).take().experts
    reader.close()


@pytest.mark.parametrize("name", ["plan", "prompts"])
def test_our_programs(decoys: Path, name: str) -> None:
    """Up to where they find that there is no such model: what they import has been imported then."""
    arguments = {"plan": ["nowhere"], "prompts": ["socket", '{"model": "nowhere"}']}
    said = {"plan": "nowhere", "prompts": "no tokenizer"}
    env = {k: v for k, v in os.environ.items() if k not in HIDDEN and not k.startswith("KTSERVE_")}
    done = subprocess.run(
        program(name, *arguments[name]),
        cwd=decoys,
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1 and said[name] in done.stderr, done.stderr
