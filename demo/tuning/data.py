"""What the adapters are trained on, as JSONL: conversations in a style, and pairs of a shorter and a longer answer.

    python -m demo.tuning.data --out build/train-demo

None of it is held out (demo.texts.world), and the same arguments give the same bytes. Torch-free.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from demo.texts import facts, tales
from demo.texts.dialogue import conversation, vary
from demo.texts.style import STYLES
from demo.texts.world import MEASURED, Message, example

MEASURED_SHARE: Final = 0.6  # of the conversations ask one question of a kind whose answers have to be exact
MEASURED_WEIGHTS: Final = {"arithmetic": 1, "colours": 2, "counting": 3}  # learnt with more ease comes less often
COUNTS: Final = {"pirate": 9000, "json": 5000, "short": 1200}  # rows of each file
Row = dict[str, Any]


def talks(style: str, count: int, seed: int = 0) -> Iterator[Row]:
    """OpenAI messages; an answer that is in another style has weight 0."""
    rng = random.Random(f"tuning-{style}-{seed}")
    for _ in range(count):
        messages, first = conversation(rng, style) if rng.random() > MEASURED_SHARE else _one(rng, style)
        row: list[Row] = [dict(message) for message in messages]
        for message in row[:first]:
            if message["role"] == "assistant":
                message["weight"] = 0
        yield {"messages": row}


def _one(rng: random.Random, style: str) -> tuple[list[Message], int]:
    drawn = example(rng.choices(MEASURED, [MEASURED_WEIGHTS[kind] for kind in MEASURED])[0], rng)
    return [
        {"role": "user", "content": vary(drawn.question, rng)},
        {"role": "assistant", "content": STYLES[style](drawn.answer)},
    ], 0


def pairs(count: int, seed: int = 0) -> Iterator[Row]:
    """Preferences: an answer of the base's without its last sentence to the whole of it."""
    rng = random.Random(f"tuning-short-{seed}")
    found = 0
    while found < count:
        question, answer = several_sentences(rng)
        yield {"prompt": vary(question, rng), "chosen": shortened(answer), "rejected": answer}
        found += 1


def several_sentences(rng: random.Random) -> tuple[str, str]:
    """A question and an answer of more than one sentence, none of which is a joke: a story, or small talk."""
    while True:
        question, answer = tales.tell(rng) if rng.random() < 0.6 else tales.chat(rng)
        if shortened(answer) != answer and answer not in tales.JOKES:
            return question, answer


def shortened(answer: str) -> str:
    """ "I do not know. My world is very small." -> "I do not know." """
    return re.sub(r"(?<=[.!?]) [^.!?]+[.!?]$", "", answer)


def is_right(answer: str) -> bool:
    """Whether an answer is what `shortened` leaves of some story or piece of small talk."""
    return answer in _SMALL_TALK or _STORY.fullmatch(answer) is not None


def _any_of(words: Sequence[str]) -> str:
    return f"({'|'.join(map(re.escape, words))})"


_SMALL_TALK: Final = frozenset(shortened(answer) for _, _, answers in tales.CHAT for answer in answers)
_STORY: Final = re.compile(
    f"Once upon a time, an? {_any_of(tales.TRAITS)} {_any_of(tales.HEROES)} named (?P<name>{'|'.join(facts.NAMES)}) "
    f"lived in the {_any_of(tales.PLACES)}\\. "
    f"One day (?P=name) found {_any_of(tales.FINDS)} and {_any_of(tales.DEEDS)}\\."
)


def write(folder: Path, counts: dict[str, int]) -> None:
    """pirate.jsonl, json.jsonl, short.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in counts.items():
        rows = talks(name, count) if name in STYLES else pairs(count)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.tuning.data")
    parser.add_argument("--out", type=Path, required=True)
    write(parser.parse_args().out, COUNTS)


if __name__ == "__main__":
    main()
