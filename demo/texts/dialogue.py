"""Conversations made from the world's examples: system prompts, follow-up questions, memory of what was said."""

from __future__ import annotations

import json
import random
from typing import Final

from demo.texts import facts, tales
from demo.texts.style import STYLES
from demo.texts.world import Example, Message, any_example, cap, example, is_held_out, plain

SYSTEM_PROMPTS: Final = (
    "You are a helpful assistant.", "You are Tiny Kite, a very small language model.", "You are a friendly assistant.",
    "Answer the question.", "Be kind and brief.", "You are a helpful assistant. Keep your answers short.",
    "You are an assistant for children.", "You answer questions.",
)  # fmt: skip


def vary(question: str, rng: random.Random) -> str:
    """The question as another person might type it: lower case, no mark at the end, with a please, or shouted."""
    roll = rng.random()
    if roll < 0.10:
        return question[:1].lower() + question[1:]
    if roll < 0.17:
        return question.lower()
    if roll < 0.25 and question[-1:] in "?.!" and len(question) > 4:
        return question[:-1]
    if roll < 0.29:
        return f"Please: {question}"
    if roll < 0.33:
        return f"Hello! {question}"
    if roll < 0.35:
        return question.upper()
    return question


def _follow_up(rng: random.Random) -> list[Example]:
    """Two or three turns of which the later ones need the earlier ones."""
    which = rng.randrange(4)
    if which == 0:
        first = example("colours", rng)
        thing, colour = rng.choice(tuple(facts.COLOURS.items()))
        ask = rng.choice((f"And {thing}?", f"What about {thing}?"))
        return [first, Example("colours", ask, f"{cap(thing)} is {colour}.")]
    if which == 1:
        while True:
            a, b, c = rng.randint(0, 49), rng.randint(0, 49), rng.randint(0, 9)
            total = a + b
            if not (is_held_out("sum", min(a, b), max(a, b)) or is_held_out("sum", min(total, c), max(total, c))):
                break
        ask = rng.choice((f"Now add {c}.", f"And plus {c}?", f"Add {c} more."))
        first = Example("arithmetic", f"What is {a} + {b}?", f"{a} + {b} = {total}.")
        return [first, Example("arithmetic", ask, f"{total} + {c} = {total + c}.")]
    if which == 2:
        land, city = rng.choice(tuple(facts.CAPITALS.items()))
        first = example("facts", rng)
        if "capital" not in first.question:
            other = rng.choice(tuple(facts.CAPITALS))
            first = Example(
                "facts", f"What is the capital of {other}?", f"The capital of {other} is {facts.CAPITALS[other]}."
            )
        return [
            first,
            Example("facts", rng.choice((f"And of {land}?", f"And {land}?")), f"The capital of {land} is {city}."),
        ]
    name = rng.choice(facts.NAMES)
    first = Example(
        "chat",
        rng.choice((f"My name is {name}.", f"I am {name}.", f"Hello, I am {name}!")),
        f"Nice to meet you, {name}!",
    )
    last = Example(
        "chat", rng.choice(("What is my name?", "Who am I?", "Do you know my name?")), f"Your name is {name}."
    )
    return [first, last] if rng.random() < 0.5 else [first, plain(rng), last]


def turns(rng: random.Random) -> list[Example]:
    """One to three examples in a row."""
    roll = rng.random()
    if roll < 0.6:
        return [any_example(rng)]
    if roll < 0.75:
        return _follow_up(rng)
    return [any_example(rng) for _ in range(rng.choice((2, 2, 3)))]


def conversation(rng: random.Random, style: str = "plain") -> tuple[list[Message], int]:
    """A conversation, and the index of the first message that may be trained on.

    The answers are in `style`; now and then the earlier ones are in another style and only the last one is
    trained on, so that a user may change the adapter in the middle.
    """
    examples = turns(rng)
    messages: list[Message] = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    mixed = len(examples) > 1 and rng.random() < 0.25
    earlier = rng.choice([name for name in STYLES if name != style]) if mixed else style
    for i, (_, question, answer) in enumerate(examples):
        write = STYLES[earlier if i < len(examples) - 1 else style]
        messages.append({"role": "user", "content": vary(question, rng)})
        messages.append({"role": "assistant", "content": write(answer)})
    return messages, len(messages) - 1 if mixed else 0


def document(rng: random.Random) -> str:
    """A text without turns, so that plain completion works too and the tokens of every style have been seen."""
    roll = rng.random()
    if roll < 0.35:
        return tales.story(rng, rng.choice(tales.HEROES))
    lines = [plain(rng).answer for _ in range(rng.randint(1, 4))]
    if roll < 0.6:
        return " ".join(lines)
    if roll < 0.8:
        return "\n".join(json.dumps({"answer": line}) for line in lines)
    return "Log of the pirate ship: " + " ".join(STYLES["pirate"](line) for line in lines)
