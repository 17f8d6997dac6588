"""`ktserve serve` with a data folder, over the fake engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from testing.waiting import eventually
from tests.api.conftest import BUILT_IN, Running, model_dir, serving

__all__ = ["model_dir"]

ADAPTERS = [flag for name in BUILT_IN for flag in ("--adapters", f"{name}=/fake/{name}")]
ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, model: str = "tiny", text: str = "hello", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    body = {"model": model, "messages": messages, "max_tokens": 8, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def upload(client: openai.OpenAI, data: bytes) -> str:
    return client.files.create(file=("in.jsonl", data), purpose="batch").id


def start(client: openai.OpenAI, data: bytes, endpoint: Any = "/v1/chat/completions", window: Any = "24h") -> str:
    return client.batches.create(input_file_id=upload(client, data), endpoint=endpoint, completion_window=window).id


def ended(client: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    found: list[openai.types.Batch] = []

    def over() -> bool:
        found[:] = [client.batches.retrieve(batch_id)]
        return found[0].status in ENDED

    eventually(over, "the batch did not end")
    return found[0]


def answers(client: openai.OpenAI, batch: openai.types.Batch) -> tuple[list[dict], list[dict]]:
    """The lines of the output and of the error file."""
    files = [batch.output_file_id, batch.error_file_id]
    texts = [client.files.content(file).text if file else "" for file in files]
    output, errors = ([json.loads(each) for each in text.splitlines()] for text in texts)
    return output, errors


def ids(lines: list[dict]) -> list[str]:
    return [each["custom_id"] for each in lines]


@pytest.fixture(scope="session")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("batches")
    with serving(model_dir, folder, "--data-dir", str(folder / "data"), *ADAPTERS) as running:
        yield running
