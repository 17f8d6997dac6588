"""Seeded traffic: conversations of turns, each turn after the answer before it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_VOCABULARY = 30_000


@dataclass(frozen=True)
class Turn:
    """`prompt` follows the conversation so far. `wait_s` is from the conversation's start or the answer before."""

    wait_s: float
    prompt: tuple[int, ...]
    output: int
    part_ends: tuple[int, ...] = ()  # rising positions in `prompt` where documents end

    def ends_behind(self, tokens: int) -> tuple[int, ...]:
        """Of its parts, behind so many tokens of the conversation."""
        return tuple(tokens + end for end in self.part_ends)


@dataclass(frozen=True)
class Conversation:
    """`system_tokens`: with which it begins as others do."""

    start_s: float
    turns: tuple[Turn, ...]
    tenant: str = "one"
    weight: float = 1.0
    adapter: int = 0  # 0: the base
    system_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.prompt) + turn.output for turn in self.turns)


Trace = list[Conversation]
Generator = Callable[[int, float, float], Trace]


def chat(seed: int, seconds: float, rate: float) -> Trace:
    """People who talk in a few turns, behind one of three system prompts."""
    rng = random.Random(f"chat {seed}")
    systems = [_text(rng, length) for length in (200, 400, 800)]
    return [_talk(rng, start, rng.choice(systems)) for start in _arrivals(rng, seconds, rate)]


def rag(seed: int, seconds: float, rate: float) -> Trace:
    """Questions behind three of 50 documents, popular ones first and more often."""
    rng = random.Random(f"rag {seed}")
    system, documents = _text(rng, 100), [_text(rng, 500) for _ in range(50)]
    found = []
    for start in _arrivals(rng, seconds, rate):
        chosen = sorted({_zipf(rng, len(documents)) for _ in range(3)})
        prompt = system + sum((documents[i] for i in chosen), ()) + _text(rng, _length(rng, 30))
        ends = tuple(len(system) + 500 * count for count in range(1, len(chosen) + 1))
        turns = (Turn(0.0, prompt, _length(rng, 100), ends),)
        found.append(Conversation(start, turns, system_tokens=len(system)))
    return found


def agents(seed: int, seconds: float, rate: float) -> Trace:
    """Programs that call tools: many turns of long inputs and short outputs with little time between."""
    rng = random.Random(f"agents {seed}")
    system = _text(rng, 1200)
    found = []
    for start in _arrivals(rng, seconds, rate):
        turns = [Turn(0.0, system + _text(rng, _length(rng, 80)), _length(rng, 50))]
        for _ in range(rng.randint(4, 12)):
            turns.append(Turn(rng.uniform(0.2, 1.0), _text(rng, _length(rng, 200)), _length(rng, 50)))
        found.append(Conversation(start, tuple(turns), system_tokens=len(system)))
    return found


def floods(seed: int, seconds: float, rate: float) -> Trace:
    """Two tenants who chat, one of twice the weight, and a third that sends 100 requests at once, again and again."""
    rng = random.Random(f"floods {seed}")
    found = []
    for tenant, weight in (("quiet", 1.0), ("heavier", 2.0)):
        for start in _arrivals(rng, seconds, rate / 2):
            found.append(_talk(rng, start, _text(rng, 50), tenant, weight))
    for burst in range(max(1, int(seconds / 20))):
        for _ in range(100):
            turn = Turn(0.0, _text(rng, _length(rng, 250)), _length(rng, 120))
            found.append(Conversation(2.0 + 20.0 * burst, (turn,), "flood"))
    return found


def adapters(seed: int, seconds: float, rate: float, count: int = 32) -> Trace:
    """One question each, on one of `count` adapters, the first far more often than the last."""
    rng = random.Random(f"adapters {seed}")
    found = []
    for start in _arrivals(rng, seconds, rate):
        turn = Turn(0.0, _text(rng, _length(rng, 150)), _length(rng, 80))
        found.append(Conversation(start, (turn,), adapter=1 + _zipf(rng, count)))
    return found


TRACES: dict[str, Generator] = {f.__name__: f for f in (chat, rag, agents, floods, adapters)}


def _talk(
    rng: random.Random, start: float, system: tuple[int, ...], tenant: str = "one", weight: float = 1.0
) -> Conversation:
    turns = []
    for number in range(min(8, 1 + int(rng.expovariate(1 / 2.0)))):
        prompt = _text(rng, _length(rng, 40))
        wait = rng.expovariate(1 / 5.0) if number else 0.0
        turns.append(Turn(wait, prompt if number else system + prompt, _length(rng, 120)))
    return Conversation(start, tuple(turns), tenant, weight, system_tokens=len(system))


def _arrivals(rng: random.Random, seconds: float, rate: float) -> Iterator[float]:
    """Of a Poisson process of `rate` a second."""
    now = rng.expovariate(rate)
    while now < seconds:
        yield now
        now += rng.expovariate(rate)


def _length(rng: random.Random, median: float) -> int:
    return max(4, min(2048, round(rng.lognormvariate(math.log(median), 0.7))))


def _zipf(rng: random.Random, count: int) -> int:
    return rng.choices(range(count), [1 / (i + 1) for i in range(count)])[0]


def _text(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(100, _VOCABULARY), k=length))
