"""An engine whose vocabulary is bytes. The tests of grammars alone need no engine, and no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.grammar.vocabulary import END

if TYPE_CHECKING:
    from tests.grammar.writer import Writer


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a layer that makes drafts, where one is asked for them."""
    from testing.models.mtp import TorchMtp, add_mtp
    from testing.models.tiny import save_hf, tiny_model

    folder, model = tmp_path_factory.mktemp("bytes"), tiny_model(family="glm4_moe", vocab_size=300, eos_token_id=END)
    save_hf(model, folder)
    add_mtp(TorchMtp(model), folder)
    return folder


@pytest.fixture
def start(byte_model: Path) -> Iterator[Callable[..., Writer]]:
    """Engines of the model, closed at the end."""
    from tests.grammar.writer import Writer

    started: list[Writer] = []

    def start(**config: Any) -> Writer:
        started.append(Writer(byte_model, **config))
        return started[-1]

    yield start
    for writer in started:
        writer.close()


@pytest.fixture(scope="module")
def writer(byte_model: Path) -> Iterator[Writer]:
    from tests.grammar.writer import Writer

    engine = Writer(byte_model)
    yield engine
    engine.close()
