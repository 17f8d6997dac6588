"""A model folder with a tokenizer, and `ktserve serve` over the fake engine as a subprocess."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer

from api.text.bytelevel import byte_level_tokenizer, byte_of_char
from testing.forked import Forked
from testing.waiting import PATIENCE_S, eventually

FAKE = Path(__file__).with_name("fake_engine.py")
ROOT = FAKE.parent.parent.parent
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġw", "o"), ("r", "l"), ("Ã", "¤")]


def tiny_tokenizer() -> Tokenizer:
    """Byte-level: 3 special tokens, 256 bytes, a few merges, one added token that is not special."""
    tokens = [*SPECIAL, *byte_of_char(), *("".join(merge) for merge in MERGES), "<tool>"]
    added = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    return byte_level_tokenizer(tokens, MERGES, [*added, AddedToken("<tool>", special=False, normalized=False)])


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


class Running:
    """A started `ktserve serve`."""

    def __init__(self, process: Forked, url: str, log: Path, stderr: Path, key: str) -> None:
        self.process = process
        self.url = url
        self.log = log
        self.stderr_path = stderr
        self._received: list[dict[str, Any]] = []
        self._read = 0  # bytes of the log
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S, headers={"Authorization": f"Bearer {key}"})
        import openai  # a second and a half, and many of these tests start no server

        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def received(self, kind: str | None = None) -> list[dict[str, Any]]:
        """What the fake engine was sent. Only what has come since the last look is read."""
        if self.log.exists():
            with self.log.open("rb") as file:
                file.seek(self._read)
                whole, _, _ = file.read().rpartition(b"\n")
            self._read += len(whole) + 1 if whole else 0
            self._received += map(json.loads, whole.splitlines())
        return [line for line in self._received if kind is None or line["type"] == kind]

    def wait_for(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        eventually(lambda: len(self.received(kind)) >= count, f"{count} {kind} messages did not come")
        return self.received(kind)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


def environment(**fake: Any) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("KTSERVE_")}
    command = f"{sys.executable} {FAKE}"
    path = os.pathsep.join([str(ROOT), clean.get("PYTHONPATH", "")])
    return {**clean, "KTSERVE_ENGINE_COMMAND": command, "FAKE_ENGINE": json.dumps(fake), "PYTHONPATH": path}


@contextlib.contextmanager
def serving(
    model: Path, folder: Path, *flags: str, key: str = "none", program: str = "api.cli.main", **fake: Any
) -> Iterator[Running]:
    """`ktserve serve` on a free port, ready to answer. `program`: the module that is run."""
    log, stderr = folder / "messages.jsonl", folder / "stderr.txt"
    with open(os.devnull, "rb") as nothing, open(stderr, "wb") as sink:
        argv = ["serve", str(model), "--port", "0", *flags]
        process = Forked(program, argv, environment(log=str(log), **fake), (nothing, sink, sink))
    try:
        url = _wait_until_ready(process, stderr)
        running = Running(process, url, log, stderr, key)
        yield running
        running.http.close()
        running.openai.close()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: Forked, stderr: Path) -> str:
    urls: list[str] = []

    def ready() -> bool:
        assert process.poll() is None, stderr.read_text()
        lines = stderr.read_text().splitlines()
        urls[:] = [line.split()[1].removesuffix("/v1") for line in lines if re.fullmatch("at .*/v1", line)]
        with contextlib.suppress(httpx.TransportError):
            return bool(urls) and httpx.get(f"{urls[0]}/health", timeout=PATIENCE_S).status_code == 200
        return False

    eventually(ready, "the server did not come up")
    return urls[0]


BUILT_IN = ("reverse", "gated", "die", "refuse", "fail", "silent", "burst", "say")


@pytest.fixture(scope="session")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for the tests that leave it whole. Its admin key is "admin"."""
    folder = tmp_path_factory.mktemp("server")
    adapters = [flag for name in BUILT_IN for flag in ("--adapters", f"{name}=/fake/{name}")]
    with serving(model_dir, folder, *adapters, "--admin-key", "admin", "--allow-any-adapter-path") as running:
        yield running
