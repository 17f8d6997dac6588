"""Coding agents as they are installed, against a server whose answers are told (tests/clients/scripted_engine.py)."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.clients.asked import needs

needs()

import gguf

from demo.paths import demo_model
from tests.clients.programs import BIN, PROGRAMS, Program
from tests.e2e.conftest import Server, serving

CONTEXT = 32768  # tokens: agents' first prompts are longer than what the demo model has learnt
TURNS = 20
ENOUGH_CACHED = 0.95
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c49444154789c63f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
)


def with_context(file: Path, tokens: int) -> None:
    """Say in a GGUF file that its context is so long."""
    gguf.GGUFReader(file, "r+").fields["qwen3moe.context_length"].parts[-1][0] = tokens


class Scripted(NamedTuple):
    """A server, the file of what it answers, and that of the prompts it was sent, a JSON text a line."""

    server: Server
    script: Path
    prompts: Path


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    folder = tmp_path_factory.mktemp("scripted")
    model, script, prompts = folder / "model.gguf", folder / "script.json", folder / "prompts.jsonl"
    shutil.copy(demo_model(), model)
    with_context(model, CONTEXT)
    script.write_text("{}")
    flags = ("--served-model-name", "demo", "--pack-cache", "off", "--kv-cache-tokens", str(CONTEXT))
    command = f"{sys.executable} -m tests.clients.scripted_engine"
    told = {"KTSERVE_ENGINE_COMMAND": command, "SCRIPT": str(script), "PROMPTS": str(prompts)}
    with serving(folder, str(model), *flags, environment=told) as server:
        yield Scripted(server, script, prompts)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", PROGRAMS, ids=lambda kind: kind.name)
def test_a_session(scripted: Scripted, tmp_path: Path, kind: type[Program]) -> None:
    """A file, a file that is not there, an image, and more files to the twentieth turn; then another conversation."""
    if not (BIN / kind.name).exists():
        pytest.skip(f"{kind.name} is not installed (make test-clients)")
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir(), folder.mkdir()
    files = [folder / f"note{i}.txt" for i in range(TURNS - 3)]
    for i, file in enumerate(files):
        file.write_text(f"The colour of number {i} is blue.\n")
    (folder / "CLAUDE.md").write_text("The kite is red. " * 500)  # Claude Code's own text behind the question is long
    (folder / "dot.png").write_bytes(PIXEL)
    program = kind(scripted.server.url, home, folder)
    calls = [program.read(files[0]), program.read(folder / "missing.txt"), program.look(folder / "dot.png")]
    calls += [program.read(file) for file in files[1:]]
    first, second = f"{kind.name} first conversation", f"{kind.name} second conversation"
    script = {first: [*calls, "All of them are blue."], second: ["Number three is blue."]}
    scripted.script.write_text(json.dumps(script))

    ended = program.run(first)
    assert ended.answer == "All of them are blue."
    last = [prompt for line in scripted.prompts.open() if first in (prompt := json.loads(line))][-1]
    shown = last[last.rindex(first) :]
    for i in range(len(files)):
        assert f"The colour of number {i} is blue." in shown
    assert shown.count("<|im_start|>assistant") == TURNS
    assert "missing.txt" in shown and "image" in shown

    ended = program.run(second)
    assert ended.answer == "Number three is blue."
    assert ended.cached >= ENOUGH_CACHED * ended.prompt, ended
