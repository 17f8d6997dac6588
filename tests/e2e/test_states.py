"""A model whose layers keep states, over HTTP: a second conversation begins behind the system message."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from testing.models.tiny import save_hf, tiny_model
from tests.api.conftest import TEMPLATE, tiny_tokenizer
from tests.e2e.conftest import Server, serving

SYSTEM, SAID = "Answer in short sentences, and say where you know it. " * 4, "Why does the wind blow?"
TOOL = {
    "name": "look",
    "description": "Looks at a place and says what is there, as far as it can be seen from here.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_moe_text"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp(request.param)
    save_hf(tiny_model(family=request.param, vocab_size=320, max_position_embeddings=4096), folder / "model")
    tiny_tokenizer().save(str(folder / "model" / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    flags = ("--device", "cpu", "--pack-cache", "off", "--kv-cache-tokens", "16384", "--max-num-seqs", "2")
    with serving(folder, str(folder / "model"), *flags, "--check-integrity") as server:
        yield server


def chat(server: Server, system: str, said: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": said}]
    return post(server, "/v1/chat/completions", {"messages": messages, "max_tokens": 2, **more})


def chat_in_parts(server: Server, system: str, said: str) -> None:
    chat(server, system, "", messages=[
        {"role": "developer", "content": [{"type": "text", "text": system}]},
        {"role": "user", "content": [{"type": "text", "text": said}]},
    ])  # fmt: skip


def responses(server: Server, system: str, said: str) -> None:
    post(server, "/v1/responses", {"instructions": system, "input": said, "max_output_tokens": 2})


def messages(server: Server, system: str, said: str) -> None:
    given = [{"role": "user", "content": said}]
    post(server, "/v1/messages", {"system": system, "messages": given, "max_tokens": 2})


def ollama(server: Server, system: str, said: str) -> None:
    given = [{"role": "system", "content": system}, {"role": "user", "content": said}]
    post(server, "/api/chat", {"messages": given, "stream": False, "options": {"num_predict": 2}})


def post(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = server.http.post(path, json={"model": "model", "temperature": 0, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("ask", [chat, chat_in_parts, responses, messages, ollama])
def test_a_second_conversation_begins_behind_the_system_message(
    server: Server, ask: Callable[[Server, str, str], object]
) -> None:
    """Whatever the dialect of the first."""
    system = f"Asked by {ask.__name__}. {SYSTEM}"
    ask(server, system, "What is the sea?")
    check(chat(server, system, SAID))


def test_tools_are_a_part_of_it(server: Server) -> None:
    tools = [{"type": "function", "function": TOOL}]
    chat(server, SYSTEM, "What is the sea?", tools=tools)
    check(chat(server, SYSTEM, SAID, tools=tools))


def check(answer: dict[str, Any]) -> None:
    """All was found but the part of a block in which the user begins to speak, and what follows."""
    usage = answer["usage"]
    own = len(tiny_tokenizer().encode(f"\n{SAID}<|im_end|>\n<|im_start|>assistant\n").ids)
    assert own <= usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] < own + 16
