"""The real thing: `ktserve serve` with the demo model and its adapters, as a newcomer starts it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import openai
import pytest

from testing.forked import Forked
from testing.waiting import PATIENCE_S, eventually


class Server:
    """A started server, its address and what it printed."""

    def __init__(self, process: Forked, url: str, output: Path) -> None:
        self.process = process
        self.url = url
        self.output = output
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S)

    def async_client(self) -> openai.AsyncOpenAI:
        """A new one: it belongs to one event loop. Use `async with`."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)

    def ask(self, text: str, model: str = "demo", **settings) -> str:
        messages = [{"role": "user", "content": text}]
        settings = {"temperature": 0, "max_tokens": 120, **settings}
        answer = self.client.chat.completions.create(model=model, messages=messages, **settings)
        return answer.choices[0].message.content


@contextlib.contextmanager
def serving(folder: Path, *flags: str, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """On a free port; ends with SIGTERM and insists on a clean exit. `environment`: variables beside this process's."""
    output = folder / "output.txt"
    clean = {key: value for key, value in os.environ.items() if not key.startswith("KTSERVE_")}
    with open(os.devnull, "rb") as nothing, output.open("wb") as sink:
        argv = ["serve", "--port", "0", *flags]
        process = Forked("api.cli.main", argv, {**clean, **(environment or {})}, (nothing, sink, sink))
    try:
        server = Server(process, _address(process, output), output)
        yield server
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, output.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _address(process: Forked, output: Path) -> str:
    lines: list[str] = []

    def printed() -> bool:
        assert process.poll() is None, output.read_text()
        lines[:] = [line for line in output.read_text().splitlines() if re.fullmatch("at .*/v1", line)]
        return bool(lines)

    eventually(printed, "the server did not come up")
    return lines[0].split()[1].removesuffix("/v1")


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> Iterator[Server]:
    """The demo server for all tests that leave it whole; every step checks its own integrity."""
    folder = tmp_path_factory.mktemp("demo")
    with serving(
        folder, "--admin-key", "admin", "--allow-any-adapter-path", "--check-integrity", "--pack-cache", "off"
    ) as server:
        yield server
