"""The texts that drafts are measured on, and the way through the measurement."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.cpu.speculate import Engine
from benchmarks.cpu.texts import KINDS, exchanges
from demo.paths import demo_model


@pytest.mark.parametrize("kind", KINDS)
def test_texts_differ_and_are_as_long_as_asked(kind: str) -> None:
    found = list(islice(exchanges(kind, 5000, 64, 48), 64))
    assert len({tuple(one.answer) for one in found}) == len(found)
    for one in found:
        assert 0 < len(one.prompt) <= 64 and len(one.answer) == 48
        assert all(10 <= token < 5000 for token in [*one.prompt, *one.answer])


@pytest.mark.parametrize("overlap", ["--overlap", "--no-overlap"])
@pytest.mark.parametrize("speculate", [None, "ngram:4:always", "suffix:4"])
def test_the_answers_come(speculate: str | None, overlap: str) -> None:
    """Where they do not, `decode` raises."""
    engine = Engine(demo_model(), speculate, 2, ["--device", "cpu", "--cpu-threads", "1", overlap])
    found = engine.decode(list(islice(exchanges("tools", engine.vocabulary, 128, 64), 2)))
    engine.core.close()
    assert found.speed > 0
    assert speculate != "ngram:4:always" or (found.accepted > 0.1 and found.made > 1)
