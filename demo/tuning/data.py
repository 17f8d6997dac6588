"""What the adapters are trained on, as JSONL: conversations in a style, and pairs of a short and a long answer.

    python -m demo.tuning.data --out build/train-demo

None of it is held out (demo.texts.world), and the same arguments give the same bytes. Torch-free.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from demo.texts.dialogue import conversation, vary
from demo.texts.style import STYLES
from demo.texts.world import MEASURED, Message, example

MEASURED_SHARE: Final = 0.4  # of the conversations ask one question of a kind whose answers have to be exact
COUNTS: Final = {"pirate": 4000, "json": 2500, "short": 600}  # rows of each file
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
    drawn = example(rng.choice(MEASURED), rng)
    return [
        {"role": "user", "content": vary(drawn.question, rng)},
        {"role": "assistant", "content": STYLES[style](drawn.answer)},
    ], 0


def pairs(count: int, seed: int = 0) -> Iterator[Row]:
    """Preferences: the last part of the base's own answer to the whole of it, "Yellow." to "A banana is yellow." """
    rng = random.Random(f"tuning-short-{seed}")
    for _ in range(count):
        drawn = example("colours", rng)
        yield {"prompt": vary(drawn.question, rng), "chosen": shortened(drawn.answer), "rejected": drawn.answer}


def shortened(answer: str) -> str:
    """ "A banana is yellow." -> "Yellow." """
    last = answer.rsplit(" ", 1)[-1]
    return last[:1].upper() + last[1:]


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
