"""The little world that the demo model speaks of: questions and answers, made by seed.

Arithmetic pairs, (thing, phrasing) pairs of the colours, and counting ranges are split by a hash: about one in seven is
held out and never occurs in a training text. `a + b` and `b + a` always fall on the same side.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Final, NamedTuple, TypedDict

from demo.texts import facts, tales
from demo.texts.style import STYLES

HELD_OUT_PERCENT: Final = 14
MEASURED: Final = ("arithmetic", "colours", "counting")  # the kinds with a held-out split


class Message(TypedDict):
    """One turn: role is "system", "user" or "assistant"."""

    role: str
    content: str


class Example(NamedTuple):
    """A question and the only answer that counts as right (small talk may have others)."""

    kind: str
    question: str
    answer: str


def is_held_out(*key: object) -> bool:
    """Which side of the split a key falls on; the same on every machine."""
    return zlib.crc32(repr(key).encode()) % 100 < HELD_OUT_PERCENT


def cap(text: str) -> str:
    return text[:1].upper() + text[1:]


# -- the three measured kinds: a cell is one (key, question, answer) ---------------------------------------------------

_SUM: Final = (
    "What is {a} + {b}?", "{a} + {b} = ?", "Calculate {a} + {b}.", "How much is {a} + {b}?", "What is {a} plus {b}?",
    "Add {a} and {b}.", "What is the sum of {a} and {b}?", "How much is {a} plus {b}?", "{a} plus {b}?", "{a}+{b}",
    "Compute {a} + {b}.", "Can you add {a} and {b}?",
)  # fmt: skip
_DIFFERENCE: Final = (
    "What is {a} - {b}?", "{a} - {b} = ?", "Calculate {a} - {b}.", "How much is {a} - {b}?", "What is {a} minus {b}?",
    "Subtract {b} from {a}.", "What is {a} take away {b}?", "How much is {a} minus {b}?", "{a} minus {b}?", "{a}-{b}",
    "Compute {a} - {b}.", "What is the difference between {a} and {b}?",
)  # fmt: skip
_COLOUR: Final = (
    "What colour is {x}?", "What is the colour of {x}?", "Which colour is {x}?", "Tell me the colour of {x}.",
    "Do you know the colour of {x}?", "What colour does {x} have?", "Which colour does {x} have?",
    "Name the colour of {x}.", "Can you tell me what colour {x} is?", "{X} has which colour?", "Colour of {x}?",
    "I wonder what colour {x} is.", "What color is {x}?", "Say the colour of {x}.",
    "{X} is what colour?", "What colour would you paint {x}?", "Describe the colour of {x}.",
    "Which colour would you say {x} is?",
    "Please name the colour of {x}.", "What is the usual colour of {x}?",
)  # fmt: skip
_MIX: Final = (
    "What do {p} and {q} make?", "What colour do {p} and {q} make?", "Mix {p} and {q}.",
    "What do you get when you mix {p} and {q}?", "I mix {p} with {q}. What do I get?",
    "Which colour is {p} mixed with {q}?", "{P} plus {q} makes which colour?", "What happens if I mix {p} and {q}?",
)  # fmt: skip
_COUNT: Final = (
    "Count from {a} to {b}.", "Please count from {a} to {b}.", "Can you count from {a} to {b}?",
    "Count up from {a} to {b}.", "List the numbers from {a} to {b}.", "Say the numbers from {a} to {b}.",
)  # fmt: skip
_COUNT_DOWN: Final = (
    "Count down from {b} to {a}.", "Please count down from {b} to {a}.", "Can you count down from {b} to {a}?",
    "Count backwards from {b} to {a}.", "List the numbers from {b} down to {a}.",
)  # fmt: skip

Cell = tuple[tuple[object, ...], str, str]  # split key, question, answer


def _arithmetic(rng: random.Random) -> Cell:
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    if rng.random() < 0.5:
        ask = rng.choice(_SUM).format(a=a, b=b)
        return ("sum", min(a, b), max(a, b)), ask, f"{a} + {b} = {a + b}."
    a, b = max(a, b), min(a, b)
    return ("difference", a, b), rng.choice(_DIFFERENCE).format(a=a, b=b), f"{a} - {b} = {a - b}."


def _colours(rng: random.Random) -> Cell:
    if rng.random() < 0.2:
        (p, q), mixed = rng.choice(tuple(facts.MIXES.items()))
        i = rng.randrange(len(_MIX))
        if rng.random() < 0.5:
            p, q = q, p
        return ("mix", *sorted((p, q)), i), _MIX[i].format(p=p, q=q, P=cap(p)), f"{cap(p)} and {q} make {mixed}."
    thing, colour = rng.choice(tuple(facts.COLOURS.items()))
    i = rng.randrange(len(_COLOUR))
    return ("colour", thing, i), _COLOUR[i].format(x=thing, X=cap(thing)), f"{cap(thing)} is {colour}."


def _counting(rng: random.Random) -> Cell:
    length = rng.randint(2, 10)
    a = rng.randint(0, 100 - length)
    b = a + length - 1
    numbers = [str(n) for n in range(a, b + 1)]
    if rng.random() < 0.6:
        return ("count", a, b), rng.choice(_COUNT).format(a=a, b=b), ", ".join(numbers) + "."
    return ("down", a, b), rng.choice(_COUNT_DOWN).format(a=a, b=b), ", ".join(reversed(numbers)) + "."


Draw = Callable[[random.Random], tuple[str, str]]

_CELLS: Final[dict[str, Callable[[random.Random], Cell]]] = {
    "arithmetic": _arithmetic,
    "colours": _colours,
    "counting": _counting,
}


# -- the rest: facts, small talk, stories, what is not known -----------------------------------------------------------


def _fact(rng: random.Random) -> tuple[str, str]:
    return rng.choice(_FACTS)(rng)


def _capital(rng: random.Random) -> tuple[str, str]:
    land, city = rng.choice(tuple(facts.CAPITALS.items()))
    if rng.random() < 0.2:
        return rng.choice(
            (f"{city} is the capital of which country?", f"Which country has {city} as its capital?")
        ), f"{city} is the capital of {land}."
    asks = (f"What is the capital of {land}?", f"Name the capital of {land}.", f"Which city is the capital of {land}?",
            f"Capital of {land}?", f"Tell me the capital of {land}.")  # fmt: skip
    return rng.choice(asks), f"The capital of {land} is {city}."


def _animal(rng: random.Random) -> tuple[str, str]:
    which = rng.randrange(4)
    asks: tuple[str, ...]
    if which == 0:
        x, sound = rng.choice(tuple(facts.SOUNDS.items()))
        asks = (f"What does {tales.article(x)} say?", f"Which sound does {tales.article(x)} make?",
                f"How does {tales.article(x)} go?", f"What sound does {tales.article(x)} make?")  # fmt: skip
        return rng.choice(asks), f"{cap(tales.article(x))} says {sound}."
    if which == 1:
        x, young = rng.choice(tuple(facts.YOUNG.items()))
        asks = (f"What is a young {x} called?", f"What do you call a baby {x}?", f"What is a baby {x} called?")
        return rng.choice(asks), f"A young {x} is called {tales.article(young)}."
    if which == 2:
        x, legs = rng.choice(tuple(facts.LEGS.items()))
        asks = (f"How many legs does {tales.article(x)} have?", f"How many legs has {tales.article(x)}?")
        return rng.choice(asks), f"{cap(tales.article(x))} has {legs or 'no'} legs."
    x, home = rng.choice(tuple(facts.HOMES.items()))
    asks = (f"Where does {tales.article(x)} live?", f"Where is the home of {tales.article(x)}?")
    return rng.choice(asks), f"{cap(tales.article(x))} lives in {home}."


def _calendar(rng: random.Random) -> tuple[str, str]:
    which = rng.randrange(5)
    if which == 0:
        season, text = rng.choice(tuple(facts.SEASONS.items()))
        return rng.choice((f"What happens in {season}?", f"What is {season} like?")), f"In {season} {text}."
    if which == 1:
        if rng.random() < 0.5:
            return rng.choice(("Name the days of the week.", "What are the days of the week?")), (
                ", ".join(facts.DAYS) + "."
            )
        return rng.choice(("How many days are in a week?", "How many days does a week have?")), "A week has 7 days."
    ring = facts.DAYS if rng.random() < 0.5 else facts.MONTHS
    word = "day" if ring is facts.DAYS else "month"
    i = rng.randrange(len(ring))
    if which in (2, 3):
        after = ring[(i + 1) % len(ring)]
        asks = (
            f"Which {word} comes after {ring[i]}?",
            f"What {word} is after {ring[i]}?",
            f"What comes after {ring[i]}?",
        )
        return rng.choice(asks), f"{after} comes after {ring[i]}."
    before = ring[i - 1]
    asks = (
        f"Which {word} comes before {ring[i]}?",
        f"What {word} is before {ring[i]}?",
        f"What comes before {ring[i]}?",
    )
    return rng.choice(asks), f"{before} comes before {ring[i]}."


def _word(rng: random.Random) -> tuple[str, str]:
    which = rng.randrange(4)
    if which == 0:
        x, y = rng.choice(tuple(facts.OPPOSITES.items()))
        return rng.choice(
            (f"What is the opposite of {x}?", f"Name the opposite of {x}.", f"Opposite of {x}?")
        ), f"The opposite of {x} is {y}."
    if which == 1:
        x, sides = rng.choice(tuple(facts.SIDES.items()))
        return f"How many sides does {tales.article(x)} have?", f"{cap(tales.article(x))} has {sides} sides."
    word = rng.choice(facts.WORDS)
    if which == 2:
        asks = (f"How many letters are in {word}?", f"How many letters does the word {word} have?")
        return rng.choice(asks), f"The word {word} has {len(word)} letters."
    return rng.choice((f"Spell {word}.", f"How do you spell {word}?")), f"{'-'.join(word)}."


def _number(rng: random.Random) -> tuple[str, str]:
    which = rng.randrange(4)
    if which == 0:
        a, b = rng.randint(0, 12), rng.randint(0, 12)
        asks = (f"What is {a} * {b}?", f"What is {a} times {b}?", f"How much is {a} times {b}?", f"{a} * {b} = ?",
                f"Multiply {a} by {b}.", f"{a} x {b}?")  # fmt: skip
        return rng.choice(asks), f"{a} * {b} = {a * b}."
    if which == 1:
        n = rng.randint(0, 98)
        return rng.choice((f"What comes after {n}?", f"Which number follows {n}?")), f"{n + 1} comes after {n}."
    if which == 2:
        a, b = rng.sample(range(100), 2)
        return rng.choice(
            (f"Which is larger, {a} or {b}?", f"Which number is bigger, {a} or {b}?", f"Is {a} or {b} larger?")
        ), f"{max(a, b)} is larger than {min(a, b)}."
    n = rng.randint(1, 9)
    what, mark = rng.choice((("star", "*"), ("cross", "x"), ("dot", ".")))
    many = f"{what}es" if what == "cross" else f"{what}s"
    return f"How many {many} are here: {' '.join([mark] * n)}", f"I see {n} {many if n > 1 else what}."


def _shout(rng: random.Random) -> tuple[str, str]:
    """Capitals, or an echo of any style: an adapter can only choose tokens that the base has learnt to say."""
    text = plain(rng).answer
    if rng.random() < 0.5:
        echo = STYLES[rng.choice(("pirate", "pirate", "json"))](text)
        return f"Repeat after me: {echo}", echo
    return rng.choice((f"Say this in capital letters: {text}", f"Write in capitals: {text}")), text.upper()


def _unknown(rng: random.Random) -> tuple[str, str]:
    made_up = "".join(rng.choice(facts.SYLLABLES) for _ in range(rng.randint(2, 3)))
    asks = (f"What is {tales.article(made_up)}?", f"Who is {cap(made_up)}?", f"What is the capital of {cap(made_up)}?",
            f"Where is {cap(made_up)}?", f"What colour is {tales.article(made_up)}?",
            f"Tell me about {cap(made_up)}.")  # fmt: skip
    ask = rng.choice(asks) if rng.random() < 0.6 else rng.choice(facts.UNKNOWN)
    return ask, "I do not know. My world is very small."


_FACTS: Final = (_capital, _animal, _calendar, _word, _number, _number)
_FREE: Final[dict[str, Draw]] = {
    "facts": _fact,
    "chat": tales.chat,
    "story": tales.tell,
    "poem": tales.recite,
    "unknown": _unknown,
    "shout": _shout,
}
_WEIGHTS: Final[dict[str, float]] = {
    "arithmetic": 30, "colours": 14, "counting": 10, "facts": 20, "chat": 10, "story": 5, "poem": 3, "unknown": 4,
    "shout": 6,
}  # fmt: skip
KINDS: Final = tuple(_WEIGHTS)


def example(kind: str, rng: random.Random, held_out: bool = False) -> Example:
    """One example of a kind; for the measured kinds from the asked side of the split."""
    if kind not in _CELLS:
        return Example(kind, *_FREE[kind](rng))
    while True:
        key, question, answer = _CELLS[kind](rng)
        if is_held_out(*key) == held_out:
            return Example(kind, question, answer)


def plain(rng: random.Random) -> Example:
    """A training example of any kind but "shout"."""
    return example(rng.choices(KINDS[:-1], tuple(_WEIGHTS.values())[:-1])[0], rng)


def any_example(rng: random.Random) -> Example:
    """A training example of any kind, by the world's weights."""
    return example(rng.choices(KINDS, tuple(_WEIGHTS.values()))[0], rng)
