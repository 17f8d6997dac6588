"""A model folder with a tokenizer, and `ktserve serve` over the fake engine as a subprocess."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import AddedToken, Tokenizer

from api.text.bytelevel import byte_level_tokenizer, byte_of_char

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

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path, stderr: Path, key: str) -> None:
        self.process = process
        self.url = url
        self.log = log
        self.stderr_path = stderr
        self.http = httpx.Client(base_url=url, timeout=30, headers={"Authorization": f"Bearer {key}"})
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30)

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def received(self, kind: str | None = None) -> list[dict[str, Any]]:
        """What the fake engine was sent."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []
        return [line for line in lines if kind is None or line["type"] == kind]

    def wait_for(self, kind: str, count: int = 1, seconds: float = 5.0) -> list[dict[str, Any]]:
        deadline = time.monotonic() + seconds
        while len(found := self.received(kind)) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} {kind} messages came"
            time.sleep(0.02)
        return found

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


def environment(**fake: Any) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("KTSERVE_")}
    command = f"{sys.executable} {FAKE}"
    path = os.pathsep.join([str(ROOT), clean.get("PYTHONPATH", "")])
    return {**clean, "KTSERVE_ENGINE_COMMAND": command, "FAKE_ENGINE": json.dumps(fake), "PYTHONPATH": path}


@contextlib.contextmanager
def serving(model: Path, folder: Path, *flags: str, key: str = "none", **fake: Any) -> Iterator[Running]:
    """`ktserve serve` on a free port, ready to answer."""
    log, stderr = folder / "messages.jsonl", folder / "stderr.txt"
    with open(stderr, "wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "api.cli", "serve", str(model), "--port", "0", *flags],
            env=environment(log=str(log), **fake),
            stderr=sink,
            stdout=sink,
            cwd=ROOT,
        )
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
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], stderr: Path) -> str:
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        for line in stderr.read_text().splitlines():
            if line.startswith("at ") and line.endswith("/v1"):
                url = line.split()[1].removesuffix("/v1")
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/health").status_code == 200:
                        return url
        assert process.poll() is None, stderr.read_text()
        time.sleep(0.05)
    raise AssertionError(f"the server did not come up:\n{stderr.read_text()}")


BUILT_IN = ("reverse", "slow", "die", "refuse", "fail", "silent", "burst")


@pytest.fixture(scope="session")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for the tests that leave it whole. Its admin key is "admin"."""
    folder = tmp_path_factory.mktemp("server")
    adapters = [flag for name in BUILT_IN for flag in ("--adapters", f"{name}=/fake/{name}")]
    with serving(model_dir, folder, *adapters, "--admin-key", "admin") as running:
        yield running
