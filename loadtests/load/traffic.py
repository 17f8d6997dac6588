"""What is sent: lengths, words and arrivals, all from one seed."""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import asdict, dataclass, field
from functools import cache

ARRIVALS = ("closed", "poisson", "bursts")
_SIGMA = 0.7  # of lengths, as chats of people have it
_BURST_PERIOD_S, _BURST_SHARE, _BURST_FACTOR = 10.0, 0.2, 4.0
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


@dataclass(frozen=True)
class Traffic:
    """Settings of a run, the same on every locust worker. Medians in words and tokens; `rate` is of new conversations
    a second and of one user, unless arrivals are closed. `keys` are by tenant; "" is the one without a name."""

    seed: int = 0
    arrival: str = "closed"
    rate: float = 1.0
    prompt_words: int = 24
    answer_tokens: int = 48
    max_tokens: int = 256
    long_words: int = 1500
    models: list[str] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)
    admin_key: str = ""
    adapter_path: str = ""
    timeout_s: float = 300.0

    def row(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of(options: argparse.Namespace | None) -> Traffic:
        """From what locust passed to this process; the defaults if it was not started by `loadtests.run`."""
        row = getattr(options, "load", None)
        return Traffic(**json.loads(row)) if row else Traffic()

    def words(self, rng: random.Random) -> int:
        """Of one turn's prompt."""
        return length(rng, self.prompt_words, 16 * self.prompt_words)

    def tokens(self, rng: random.Random) -> int:
        """Of one answer, at most."""
        return length(rng, self.answer_tokens, self.max_tokens)

    def gap_s(self, rng: random.Random, now_s: float) -> float:
        """Until the next conversation of an open user. Bursts: a fifth of each 10 s has four times the rate, the rest
        what keeps the mean; every user and worker has them at the same time (`now_s` is the time of day)."""
        if self.arrival != "bursts":
            return rng.expovariate(self.rate)
        quiet = (1 - _BURST_SHARE * _BURST_FACTOR) / (1 - _BURST_SHARE)
        due, at = rng.expovariate(self.rate), now_s
        while True:  # `due` is in seconds of the mean rate
            phase = at % _BURST_PERIOD_S
            burst = phase < _BURST_SHARE * _BURST_PERIOD_S
            factor = _BURST_FACTOR if burst else quiet
            left = (_BURST_SHARE if burst else 1.0) * _BURST_PERIOD_S - phase
            if due <= left * factor:
                return at + due / factor - now_s
            due -= left * factor
            at += left


def length(rng: random.Random, median: int, most: int) -> int:
    """Lognormal, 1 to `most`."""
    return max(1, min(most, round(rng.lognormvariate(math.log(median), _SIGMA))))


def text(rng: random.Random, words: int) -> str:
    """Sentences of made-up words, common ones more often."""
    known = _words()
    weights = _weights()
    chosen = rng.choices(known, cum_weights=weights, k=max(1, words))
    lines = [" ".join(chosen[i : i + 12]).capitalize() for i in range(0, len(chosen), 12)]
    return ". ".join(lines) + "."


def zipf(rng: random.Random, count: int) -> int:
    """0 to `count` - 1, the first most often."""
    return rng.choices(range(count), [1 / (i + 1) for i in range(count)])[0]


@cache
def _words() -> tuple[str, ...]:
    rng = random.Random("words")
    return tuple(
        "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 3))) for _ in range(2000)
    )


@cache
def _weights() -> tuple[float, ...]:
    total, found = 0.0, []
    for i in range(2000):
        total += 1 / (i + 1)
        found.append(total)
    return tuple(found)
