"""What a benchmark sends, from a seed, in tokens of the server's own tokenizer."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from loadtests.bench.client import Result, Server
from loadtests.http import HttpError
from loadtests.load.traffic import text

_PROBE_WORDS = (50, 250)
_TRIES = 12  # at a prompt of exactly as many tokens


@dataclass(frozen=True)
class Work:
    """Tokens of a prompt and of an answer; `spread` is the share by which both vary, uniformly. Each prompt begins with
    the same `prefix_tokens` (part of `input_tokens`). `models` are asked in turn, with each of them the next of
    `fields`, which are added to the request. A conversation has `turns`, each after the answer before it and all that
    was said. Each has as many tokens of its own as the first has behind the prefix."""

    models: tuple[str, ...]
    input_tokens: int
    output_tokens: int
    prefix_tokens: int = 0
    spread: float = 0.0
    seed: int = 0
    chat: bool = False
    ignore_eos: bool = True
    turns: int = 1
    fields: tuple[dict[str, Any], ...] = ()

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    async def fitted(self, server: Server, number: int, scale: Scale) -> dict[str, Any]:
        """The body of the request with this number, its end made longer or shorter until the server counts as many
        tokens as are wanted; of one that does not count, about as many."""
        body, wanted = self.body(number, scale), self._lengths(number)[0]
        for _ in range(_TRIES):
            count = await server.count(body)
            if count is None or count == wanted:
                break
            holder, key = (body["messages"][0], "content") if self.chat else (body, "prompt")
            words = holder[key].split(" ")
            if count < wanted:
                words += ["a"] * (wanted - count)
            else:
                words = words[: -max(1, (count - wanted) // 4)] or ["a"]
            holder[key] = " ".join(words)
        return body

    def _lengths(self, number: int) -> tuple[int, int]:
        """Tokens of its prompt and of its answer."""
        rng = random.Random(f"{self.seed} {number}")
        prompt, answer = (
            max(1, round(n * rng.uniform(1 - self.spread, 1 + self.spread)))
            for n in (self.input_tokens, self.output_tokens)
        )
        return prompt, answer

    def body(self, number: int, scale: Scale) -> dict[str, Any]:
        """Of the request with this number, about as long as is wanted."""
        prompt, answer = self._lengths(number)
        shared = (
            text(random.Random(f"prefix {self.seed}"), scale.words(self.prefix_tokens)) if self.prefix_tokens else ""
        )
        own = text(random.Random(f"{self.seed} {number} own"), scale.words(max(1, prompt - self.prefix_tokens)))
        return self._asked(f"{shared} {own}".strip(), answer, number)

    async def converse(self, server: Server, number: int, scale: Scale, body: dict[str, Any]) -> list[Result]:
        """Its turns, from the body of the first; the last one has failed if there are fewer."""
        results = [await server.stream(self.path, body)]
        for turn in range(1, self.turns):
            if results[-1].error:
                break
            rng = random.Random(f"{self.seed} {number} turn {turn}")
            own, said = text(rng, scale.words(max(1, self.input_tokens - self.prefix_tokens))), results[-1].text
            if self.chat:
                answer = {"role": "assistant", "content": said}
                body = body | {"messages": [*body["messages"], answer, {"role": "user", "content": own}]}
            else:
                body = body | {"prompt": f"{body['prompt']}{said} {own}"}
            results.append(await server.stream(self.path, body))
        return results

    def _asked(self, prompt: str, tokens: int, number: int) -> dict[str, Any]:
        said = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        body = {"model": self.models[number % len(self.models)], "max_tokens": tokens, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True} if self.ignore_eos else {}
        added = self.fields[number % len(self.fields)] if self.fields else {}
        return {**said, **body, "stream_options": {"include_usage": True}, **added}

    async def measure(self, server: Server) -> Scale:
        """How many tokens words are, from two prompts. HttpError if the server does not answer them."""
        counts = []
        for words in _PROBE_WORDS:
            prompt = text(random.Random(f"probe {self.seed}"), words)
            result = await server.stream(self.path, self._asked(prompt, 2, 0))
            if result.error:
                raise HttpError(result.error)
            counts.append(result.prompt_tokens)
        if not counts[0] < counts[1]:
            return Scale(0.0, 2.0)  # it tells no usage
        slope = (counts[1] - counts[0]) / (_PROBE_WORDS[1] - _PROBE_WORDS[0])
        return Scale(max(0.0, counts[0] - slope * _PROBE_WORDS[0]), slope)


@dataclass(frozen=True)
class Scale:
    """A prompt of w words has fixed + w * per_word tokens."""

    fixed: float
    per_word: float

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.fixed) / self.per_word))
