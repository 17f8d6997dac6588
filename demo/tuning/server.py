"""A server of the demo's base model alone, and questions to it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.evaluate import said
from demo.paths import demo_model
from demo.texts.world import Message

BASE = "tiny-kite"
ADMIN_KEY = "train-demo"
_AT_ONCE = 24  # requests
_START_S = 300.0


@dataclass(frozen=True)
class Server:
    url: str

    def ask(self, model: str, conversations: Sequence[Sequence[Message]]) -> list[str]:
        """Greedy answers, many at the same moment."""
        return self.ask_each([(model, messages) for messages in conversations])

    def ask_each(self, asked: Sequence[tuple[str, Sequence[Message]]]) -> list[str]:
        """Of (model, conversation) each; what is open at a moment is one batch, whatever the models."""
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            return list(threads.map(self._answer, asked))

    def table(self, models: Sequence[str], prompts: Sequence[str]) -> str:
        """All prompts to all models in one burst, as a Markdown table."""
        answers = iter(self.ask_each([(model, said(prompt)) for prompt in prompts for model in models]))
        rows = [f"| {prompt} | " + " | ".join(next(answers) for _ in models) + " |" for prompt in prompts]
        return "\n".join([f"| prompt | {' | '.join(models)} |", "|---" * (len(models) + 1) + "|", *rows])

    def _answer(self, asked: tuple[str, Sequence[Message]]) -> str:
        model, messages = asked
        body = {"model": model, "messages": list(messages), "temperature": 0, "max_tokens": 96}
        return str(self.call("/v1/chat/completions", body)["choices"][0]["message"]["content"])

    def call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_START_S) as response:
            answer: dict[str, Any] = json.load(response)
            return answer


@contextmanager
def serving(log: Path, flags: Sequence[str] = ()) -> Iterator[Server]:
    """With more `flags` of `ktserve serve`, until the block ends. RuntimeError with the place of its log if it does not
    start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "ktserve", "serve", str(demo_model()), "--served-model-name", BASE]
    command += ["--port", str(port), "--admin-key", ADMIN_KEY, "--allow-any-adapter-path", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    server = Server(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + _START_S
        while not _ready(server):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: see {log}")
            time.sleep(0.2)
        yield server
    finally:
        process.terminate()
        process.wait()


def _ready(server: Server) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=_START_S):
            return True
    except OSError:  # nothing listens yet, or it says 503
        return False
