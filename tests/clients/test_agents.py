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
from tests.clients.programs import PROGRAMS, Agent, Aider, Codex, CodexOfVendor
from tests.clients.scripted_engine import TOOLS, WITHOUT_TOOLS
from tests.e2e.conftest import Server, serving

CONTEXT = 32768  # tokens: agents' first prompts are longer than what the demo model has learnt
TURNS = 20
ENOUGH_CACHED = 0.95
COMPACT_AT = 20000  # tokens: Codex' own prompt has 11,500
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

    def prompts_with(self, mark: str) -> list[str]:
        return [prompt for line in self.prompts.open() if mark in (prompt := json.loads(line))]


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


def program_of(kind: type[Agent], scripted: Scripted, folder: Path) -> Agent:
    if not kind.path().exists():
        pytest.skip(f"{kind.name} is not installed (make test-clients)")
    home, work = folder / "home", folder / "work"
    home.mkdir(), work.mkdir()
    return kind(scripted.server.url, home, work)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", PROGRAMS, ids=lambda kind: kind.name)
def test_a_session(scripted: Scripted, tmp_path: Path, kind: type[Agent]) -> None:
    """A file, a file that is not there, an image, and more files to the twentieth turn; then another conversation."""
    program = program_of(kind, scripted, tmp_path)
    folder = program.folder
    files = [folder / f"note{i}.txt" for i in range(TURNS - 3)]
    for i, file in enumerate(files):
        file.write_text(f"The colour of number {i} is blue.\n")
    (folder / "CLAUDE.md").write_text("The kite is red. " * 500)  # Claude Code's own text behind the question is long
    (folder / "dot.png").write_bytes(PIXEL)
    calls = [program.read(files[0]), program.read(folder / "missing.txt"), program.look(folder / "dot.png")]
    calls += [program.read(file) for file in files[1:]]
    first, second = f"{kind.name} first conversation", f"{kind.name} second conversation"
    script = {first: [*calls, "All of them are blue."], second: ["Number three is blue."]}
    scripted.script.write_text(json.dumps(script))

    ended = program.run(first)
    assert ended.answer == "All of them are blue."
    last = scripted.prompts_with(first)[-1]
    shown = last[last.rindex(first) :]
    for i in range(len(files)):
        assert f"The colour of number {i} is blue." in shown
    assert shown.count("<|im_start|>assistant") == TURNS
    assert "missing.txt" in shown and kind.image in shown

    ended = program.run(second)
    assert ended.answer == "Number three is blue."
    assert ended.cached >= ENOUGH_CACHED * ended.prompt, ended


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", [Codex, CodexOfVendor])
def test_codex_compacts_its_history_and_goes_on(scripted: Scripted, tmp_path: Path, kind: type[Codex]) -> None:
    """With a provider of ours it asks for the summary in a turn of its own, its vendor's by an item of the input."""
    program = program_of(kind, scripted, tmp_path)
    files = [program.folder / f"note{i}.txt" for i in range(10)]
    for i, file in enumerate(files):
        file.write_text(f"The colour of number {i} is blue.\n" + "The kite is red. " * 300)
    first, summary, second = (f"{kind.__name__} {which}" for which in ("first", "summary", "second"))
    script = {
        first: [program.read(file) for file in files],
        WITHOUT_TOOLS: [summary],
        summary: [program.read(files[-1]), "All of them are blue."],
        second: ["It was the last."],
    }
    scripted.script.write_text(json.dumps(script))
    limit = ("-c", f"model_auto_compact_token_limit={COMPACT_AT}")

    assert program.run(first, *limit).answer == "All of them are blue."
    asked = scripted.prompts_with(first)
    (compacts,) = [i for i, prompt in enumerate(asked) if TOOLS not in prompt]
    assert 1 < compacts < len(files) and "The colour of number 0 is blue." in asked[compacts]
    for prompt in asked[compacts + 1 :]:
        assert summary in prompt and "The colour of number 0 is blue." not in prompt
    assert "The colour of number 9 is blue." in asked[-1]

    assert program.run(second, *limit, "resume", "--last").answer == "It was the last."
    last = scripted.prompts_with(second)[-1]
    assert last.index(first) < last.index(summary) < last.index("All of them are blue.") < last.index(second)
    assert "The colour of number 0 is blue." not in last


EDIT = """It subtracts.

calc.py
```python
<<<<<<< SEARCH
    return a - b
=======
    return a + b
>>>>>>> REPLACE
```
"""


@pytest.mark.timeout(1200)
def test_aider_edits_a_file_and_says_what_is_too_long(scripted: Scripted, tmp_path: Path) -> None:
    program = program_of(Aider, scripted, tmp_path)
    calc, long = program.folder / "calc.py", program.folder / "long.txt"
    calc.write_text("def add(a, b):\n    return a - b\n")
    long.write_text("The kite is red. " * CONTEXT)
    scripted.script.write_text(json.dumps({WITHOUT_TOOLS: [EDIT]}))
    ended = program.run("calc.py", "--message", "repair add")
    assert "Applied edit to calc.py" in ended.answer
    assert calc.read_text() == "def add(a, b):\n    return a + b\n"
    assert "return a - b" in scripted.prompts_with("repair add")[-1]
    ended = program.run("long.txt", "--message", "what does it say")
    assert "has hit a token limit" in ended.answer, "it has not understood the server's refusal"
