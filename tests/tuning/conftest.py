"""A tiny engine that trains beside serving, in this process."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.messages import Reply, Tune
from engine.tuning import Batch, Order, Sample, Tuned
from testing.harness import Harness
from testing.models.tiny import save_hf, tiny_model
from training.service.tuner import make_tuner

_NATIVE = {"rules": None, "expert_backend": "native", "attention_backend": "native", "linear_backend": "native"}


class Tuning:
    """A harness whose engine has a tuner."""

    def __init__(self, model: Path, **config: Any) -> None:
        self.engine = Harness(model, **{**_NATIVE, "pack_cache": "off", "fine_tuning": True, **config})
        core = self.engine.core
        core.tuner = make_tuner(core, self.engine._take, self.engine.plan.config)
        self._ids = itertools.count(1000)

    def send(self, order: Order, run: str = "run") -> int:
        call = next(self._ids)
        self.engine.core.handle(Tune(call_id=call, run=run, order=order))
        return call

    def answered(self, call: int) -> Reply | None:
        return next((m for m in self.engine.messages if isinstance(m, Reply) and m.call_id == call), None)

    def ask(self, order: Order, run: str = "run") -> Tuned:
        """An order that is to succeed, and its answer."""
        reply = self.reply(self.send(order, run))
        assert reply.ok and reply.tuned is not None, reply.error
        return reply.tuned

    def reply(self, call: int) -> Reply:
        self.engine.until(lambda: self.answered(call))
        found = self.answered(call)
        assert found is not None
        return found

    def logprobs(self, samples: list[Sample], run: str = "run", base: bool = False) -> list[np.ndarray]:
        got = self.ask(Batch(samples, learn=False, base=base, outputs=True), run)
        return [np.frombuffer(values, "<f4") for values in got.logprobs]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned-model")
    save_hf(tiny_model(), folder)
    return folder


@pytest.fixture(scope="module")
def tuning(model_folder: Path):
    made = Tuning(model_folder)
    yield made
    made.engine.close()


def sample(seed: int, length: int = 12, vocabulary: int = 100) -> Sample:
    """Of random tokens; the first third is a prompt."""
    rng = np.random.default_rng(seed)
    text = [int(token) for token in rng.integers(0, vocabulary, length + 1)]
    weights = [0.0] * (length // 3) + [1.0] * (length - length // 3)
    return Sample(text[:-1], text[1:], {"weights": weights})


def sampled(tuning: Tuning, name: str | None) -> tuple[np.ndarray, list[float]]:
    """Log-probabilities of ten sampled tokens: what training says of them, and what sampling said."""
    prompt = sample(7, 20).tokens
    rid = tuning.engine.submit(prompt, name, max_tokens=10, temperature=1.0, seed=3, logprobs=0)
    tuning.engine.run()
    result = tuning.engine.results[rid]
    text = prompt + result.tokens
    asked = Sample(text[:-1], text[1:], {"weights": [1.0] * (len(text) - 1)})
    found = tuning.logprobs([asked], base=name is None)[0]
    return found[len(prompt) - 1 :], [entry.chosen.logprob for entry in result.logprobs]
