"""An engine whose vocabulary is bytes, and what a request of it wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.messages import GrammarSpec, Submit
from scheduler.request import SamplingParams
from testing.harness import Harness, Result
from testing.models.tiny import tiny_model
from testing.models.vocabulary import vocabulary_of

END, THINK, THOUGHT = 256, 257, 258
# Every byte, the control tokens, and tokens that cross what grammars know as boundaries.
TOKENS = [
    *(bytes([byte]) for byte in range(256)),
    *(b"<|end|>", b"<think>", b"</think>"),
    *(b"true", b'":', b'{"', b'": ', b"123", b"ab", b"bc", b'"}', b'","', b"}]", b"  ", b"\n\t", b"\xe2\x82", b"e-1"),
]
VOCABULARY = vocabulary_of(TOKENS, [END, THINK, THOUGHT])


class Writer(Harness):
    """A harness with a vocabulary. `text` is what a request has written."""

    def __init__(self, model: Path, **config: Any) -> None:
        super().__init__(model, **config)
        self.core.handle(VOCABULARY)

    def ask(self, grammar: GrammarSpec | None, prompt: tuple[int, ...] = (1, 2, 3), **sampling: Any) -> str:
        rid = f"g{len(self.prompts)}"
        self.results[rid], self.prompts[rid] = Result(), list(prompt)
        params = SamplingParams(**{"max_tokens": 400, "seed": 1, **sampling})
        self.core.handle(Submit(request_id=rid, prompt=list(prompt), sampling=params, grammar=grammar))
        return rid

    def text(self, rid: str) -> bytes:
        return b"".join(TOKENS[token] for token in self.results[rid].tokens)


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    tiny_model(vocab_size=300, eos_token_id=END).save_pretrained(folder)
    return folder


@pytest.fixture
def start(byte_model: Path) -> Iterator[Callable[..., Writer]]:
    """Engines of the model, closed at the end."""
    started: list[Writer] = []

    def start(**config: Any) -> Writer:
        started.append(Writer(byte_model, **config))
        return started[-1]

    yield start
    for writer in started:
        writer.close()


@pytest.fixture(scope="module")
def writer(byte_model: Path) -> Iterator[Writer]:
    engine = Writer(byte_model)
    yield engine
    engine.close()
