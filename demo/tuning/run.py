"""Train the demo's adapters as a newcomer would, into a server that runs all the while, and measure them there.

    python -m demo.tuning.run               # make train-demo

Writes the data, serves the base, asks it (before), runs `ktserve train` with each YAML of this folder, which loads its
result into the server, and asks base and adapters in one burst (after). The exit status is 1 if the adapters miss what
docs/demo.md promises, or if `short` does not shorten answers. DIR/transcript.md has what is printed.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from demo.evaluate import failures, measure, said, table
from demo.texts.world import example
from demo.tuning.data import COUNTS, shortened, write
from demo.tuning.server import ADMIN_KEY, BASE, Server, serving

HERE = Path(__file__).resolve().parent
OUT = Path("build/train-demo")  # the YAMLs name it too
PROMPTS = ("What is 23 + 48?", "What colour is a banana?", "Count from 7 to 12.", "Tell me a story about a fox.")
SHORTER_AT_MOST = 0.6  # of the base's characters


def train(name: str, server: Server) -> float:
    """Seconds. RuntimeError if the run ends badly."""
    began = time.monotonic()
    command = [sys.executable, "-m", "ktserve", "train", str(HERE / f"{name}.yaml"), "overwrite_output_dir=true"]
    if subprocess.run([*command, "--publish", server.url, "--admin-key", ADMIN_KEY]).returncode:
        raise RuntimeError(f"training {name} failed; its last lines say why")
    return time.monotonic() - began


def shortening(server: Server, count: int) -> tuple[float, float, float]:
    """On held-out colours: mean characters of the base's answers, of `short`'s, and the share of `short`'s that are
    right."""
    rng = random.Random("short")
    drawn = [example("colours", rng, True) for _ in range(count)]
    base, short = (server.ask(model, [said(each.question) for each in drawn]) for model in (BASE, "short"))
    right = sum(got.strip() == shortened(each.answer) for got, each in zip(short, drawn, strict=True))
    return sum(map(len, base)) / count, sum(map(len, short)) / count, right / count


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m demo.tuning.run")
    parser.add_argument("--questions", type=int, default=40, help="of each kind in the measurement")
    args = parser.parse_args(argv)
    write(OUT, COUNTS)
    with serving(OUT / "server.log") as server:
        parts = [f"## Before\n\n{server.table([BASE], PROMPTS)}"]
        took = {name: train(name, server) for name in COUNTS}
        models = [BASE, *COUNTS]
        parts.append(f"## After, in one batch\n\n{server.table(models, PROMPTS)}")
        styles = {"plain": BASE, "pirate": "pirate", "json": "json"}
        results = {style: measure(partial(server.ask, model), style, args.questions) for style, model in styles.items()}
        base, short, right = shortening(server, args.questions)
    missed = failures(results)
    if short > SHORTER_AT_MOST * base:
        missed.append(f"short: {short:.1f} characters an answer, the base {base:.1f}")
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in took.items())
    effect = (
        f"Characters of an answer about colours: base {base:.1f}, short {short:.1f}, of which {right:.0%} are right."
    )
    parts += [table(results), effect, f"Training: {times}."]
    text = "\n\n".join(parts) + "\n"
    (OUT / "transcript.md").write_text(text)
    print(text)
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
