"""What a request of an engine with a vocabulary of bytes wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.messages import GrammarSpec, Submit
from scheduler.request import SamplingParams
from testing.harness import Harness, Result
from tests.grammar.vocabulary import TOKENS, VOCABULARY


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
