"""Coding agents as their vendors ship them, run without a terminal: how each is started, what its calls look like, and
what it reports at its end. None of them reaches anything but this machine: their proxy is a closed port."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import psutil

from testing.waiting import PATIENCE_S

BIN = Path(__file__).parent / "node" / "node_modules" / ".bin"
AIDER = Path(sys.prefix) / "aider" / "bin" / "aider"  # an environment of its own: it pins other versions than ours
NOWHERE = "http://127.0.0.1:9"


class Ended(NamedTuple):
    """What a run says. `prompt`, `cached`: tokens of its requests."""

    answer: str
    prompt: int
    cached: int


def call(name: str, **arguments: Any) -> str:
    """As the demo's template has it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def objects(printed: str) -> list[dict[str, Any]]:
    """Of its lines that are JSON objects."""
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def end_all(home: Path) -> None:
    """Processes with this home: some programs leave one running for the next time."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == str(home):
                process.kill()


class Program(ABC):
    """One of them, with `home` and `folder` of its own, against the server at `url`."""

    name: ClassVar[str]
    image: ClassVar[str] = "image"  # what stands in the prompt for one that was read

    def __init__(self, url: str, home: Path, folder: Path) -> None:
        self.url, self.home, self.folder = url, home, folder

    @classmethod
    def path(cls) -> Path:
        return BIN / cls.name

    @abstractmethod
    def flags(self) -> list[str]: ...

    @abstractmethod
    def environment(self) -> Mapping[str, str]: ...

    @abstractmethod
    def ended(self, printed: str) -> Ended:
        """From what it has printed."""

    def run(self, prompt: str, *more: str) -> Ended:
        """A new conversation, to its end. `more`: flags beside its own."""
        return self.ended(self.started(*self.flags(), *more, prompt))

    def started(self, *words: str) -> str:
        """What the program printed, after it has ended well."""
        proxies = {"HTTP_PROXY": NOWHERE, "HTTPS_PROXY": NOWHERE, "NO_PROXY": "127.0.0.1,localhost"}
        try:
            done = subprocess.run(
                [str(self.path()), *words],
                cwd=self.folder,
                env={"PATH": os.environ["PATH"], "HOME": str(self.home), **proxies, **self.environment()},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=4 * PATIENCE_S,
            )
        finally:
            end_all(self.home)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


class Agent(Program):
    """It reads files by calls of its tools."""

    @abstractmethod
    def read(self, file: Path) -> str:
        """The call that reads a text file."""

    @abstractmethod
    def look(self, file: Path) -> str:
        """The call that reads an image."""


class ClaudeCode(Agent):
    name = "claude"

    def read(self, file: Path) -> str:
        return call("Read", file_path=str(file))

    look = read

    def flags(self) -> list[str]:
        few = "Read,Bash,Edit,Write,TodoWrite"  # all of them are 24,000 tokens
        return ["--tools", few, "--allowedTools", few, "--output-format", "stream-json", "--verbose", "--print"]

    def environment(self) -> Mapping[str, str]:
        model = {"ANTHROPIC_MODEL": "demo", "ANTHROPIC_SMALL_FAST_MODEL": "demo"}
        return {
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            **model,
        }

    def ended(self, printed: str) -> Ended:
        last = objects(printed)[-1]
        usage = last["usage"]
        cached = usage["cache_read_input_tokens"]
        return Ended(last["result"], usage["input_tokens"] + cached, cached)


class Codex(Agent):
    name = "codex"

    def read(self, file: Path) -> str:
        return call("exec_command", cmd=f"cat {file}")

    def look(self, file: Path) -> str:
        return call("view_image", path=str(file))

    def settings(self) -> Mapping[str, str]:
        provider = f'{{name="ktserve", base_url="{self.url}/v1", wire_api="responses"}}'
        return {"model_provider": "ktserve", "model_providers.ktserve": provider}

    def flags(self) -> list[str]:
        said = [flag for name, value in self.settings().items() for flag in ("-c", f"{name}={value}")]
        without = [flag for feature in ("multi_agent", "goals") for flag in ("--disable", feature)]
        return [
            "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "demo",
            *said, *without,
        ]  # fmt: skip

    def environment(self) -> Mapping[str, str]:
        return {}

    def ended(self, printed: str) -> Ended:
        lines = objects(printed)
        items = [line["item"] for line in lines if line["type"] == "item.completed"]
        (usage,) = [line["usage"] for line in lines if line["type"] == "turn.completed"]
        said = [item["text"] for item in items if item["type"] == "agent_message"]
        return Ended(said[-1], usage["input_tokens"], usage["cached_input_tokens"])


class CodexOfVendor(Codex):
    """With its vendor's own provider, of which the address alone is another."""

    def settings(self) -> Mapping[str, str]:
        return {"openai_base_url": f'"{self.url}/v1"'}

    def environment(self) -> Mapping[str, str]:
        return {"CODEX_API_KEY": "none"}


class OpenCode(Agent):
    name = "opencode"

    def read(self, file: Path) -> str:
        return call("read", filePath=str(file))

    look = read

    def flags(self) -> list[str]:
        return ["run", "--format", "json"]

    def environment(self) -> Mapping[str, str]:
        models = {"demo": {"name": "demo", "limit": {"context": 32768, "output": 1000}}}
        options = {"baseURL": f"{self.url}/v1", "apiKey": "none"}
        provider = {"npm": "@ai-sdk/openai-compatible", "name": "ktserve", "options": options, "models": models}
        config = {
            "provider": {"ktserve": provider},
            "model": "ktserve/demo",
            "small_model": "ktserve/demo",
            "autoupdate": False,
            "share": "disabled",
            "permission": {"*": "deny", "read": "allow"},  # a denied tool is not offered
        }
        off = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
        return {"OPENCODE_CONFIG_CONTENT": json.dumps(config), **{f"OPENCODE_DISABLE_{each}": "1" for each in off}}

    def ended(self, printed: str) -> Ended:
        lines = objects(printed)
        said = [line["part"]["text"] for line in lines if line["type"] == "text"]
        steps = [line["part"]["tokens"] for line in lines if line["type"] == "step_finish"]
        cached = sum(step["cache"]["read"] for step in steps)
        return Ended(said[-1], sum(step["input"] for step in steps) + cached, cached)


class Continue(Agent):
    """Its program for terminals, with the file of settings that its editor has too."""

    name = "cn"
    image = "PNG"  # it reads the file as if it were text

    def __init__(self, url: str, home: Path, folder: Path) -> None:
        super().__init__(url, home, folder)
        model = {"name": "ktserve", "provider": "openai", "model": "demo", "apiBase": f"{url}/v1", "apiKey": "none"}
        settings = {"name": "ktserve", "version": "1.0.0", "schema": "v1", "models": [model]}
        self._settings = home / "config.yaml"
        self._settings.write_text(json.dumps(settings))

    def read(self, file: Path) -> str:
        return call("Read", filepath=str(file))

    look = read

    def flags(self) -> list[str]:
        return ["--config", str(self._settings), "--auto", "--print"]

    def environment(self) -> Mapping[str, str]:
        return {"CONTINUE_TELEMETRY_ENABLED": "0"}

    def ended(self, printed: str) -> Ended:
        """It prints the answer; the rest stands in its file of the conversation."""
        files = (self.home / ".continue" / "sessions").glob("*-*.json")
        history = json.loads(max(files, key=lambda file: file.stat().st_mtime).read_text())["history"]
        usages = [usage for item in history if (usage := item["message"].get("usage"))]
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        return Ended(printed.strip(), sum(usage["prompt_tokens"] for usage in usages), cached)


class Cline(Agent):
    name = "cline"

    def __init__(self, url: str, home: Path, folder: Path) -> None:
        super().__init__(url, home, folder)
        self.started("auth", "-p", "openai-compatible", "-k", "none", "-m", "demo", "-b", f"{url}/v1")

    def read(self, file: Path) -> str:
        return call("read_files", files=[{"path": str(file)}])

    look = read

    def flags(self) -> list[str]:
        return ["--json"]

    def environment(self) -> Mapping[str, str]:
        return {}

    def ended(self, printed: str) -> Ended:
        last = objects(printed)[-1]
        usage = last["usage"]
        return Ended(last["text"], usage["inputTokens"], usage["cacheReadTokens"])


class Aider(Program):
    """It offers no tools: edits stand in the text of the answer, and the files in its prompt."""

    name = "aider"

    def __init__(self, url: str, home: Path, folder: Path) -> None:
        super().__init__(url, home, folder)
        known = {"max_input_tokens": 32768, "max_output_tokens": 8192, "litellm_provider": "openai", "mode": "chat"}
        (home / ".aider.model.metadata.json").write_text(json.dumps({"openai/demo": known}))

    @classmethod
    def path(cls) -> Path:
        return AIDER

    def flags(self) -> list[str]:
        server = ["--openai-api-base", f"{self.url}/v1", "--openai-api-key", "none", "--model", "openai/demo"]
        quiet = ["--yes-always", "--no-git", "--no-check-update", "--analytics-disable", "--no-pretty"]
        return [*server, *quiet, "--edit-format", "diff"]

    def environment(self) -> Mapping[str, str]:
        return {}

    def ended(self, printed: str) -> Ended:
        return Ended(printed, 0, 0)


PROGRAMS: tuple[type[Agent], ...] = (ClaudeCode, Codex, OpenCode, Continue, Cline)
