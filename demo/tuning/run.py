"""Train the demo's adapters as a newcomer would, into a server that runs all the while, and measure them there.

    python -m demo.tuning.run               # make train-demo

Writes the data, serves the base and asks it (before). Runs `ktserve train` with each YAML of this folder, which loads
its result into the server. Asks base and adapters in one burst (after). The exit status is 1 if the adapters miss what
docs/demo.md promises, or if `short` does not shorten stories and small talk, or breaks anything. DIR/transcript.md has
what is printed.
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
from demo.tuning.data import COUNTS, is_right, several_sentences, write
from demo.tuning.server import ADMIN_KEY, BASE, Server, serving

HERE = Path(__file__).resolve().parent
OUT = Path("build/train-demo")  # the YAMLs name it too
PROMPTS = ("What is 23 + 48?", "What colour is a banana?", "Count from 7 to 12.", "Tell me a story about a fox.")
SHORTER_AT_MOST = 0.85  # of the base's characters
RIGHT_AT_LEAST = 0.9  # of the answers of `short` are whole sentences of a story or of small talk


def train(name: str, server: Server) -> float:
    """Seconds. RuntimeError if the run ends badly."""
    began = time.monotonic()
    command = [sys.executable, "-m", "ktserve", "train", str(HERE / f"{name}.yaml"), "overwrite_output_dir=true"]
    if subprocess.run([*command, "--publish", server.url, "--admin-key", ADMIN_KEY]).returncode:
        raise RuntimeError(f"training {name} failed; its last lines say why")
    return time.monotonic() - began


def shortening(server: Server, count: int) -> tuple[float, float, float]:
    """On stories and small talk: mean characters of the base's answers, of `short`'s, and the share of `short`'s that
    are what is left of some right answer without its last sentence."""
    rng = random.Random("short")
    asked = [several_sentences(rng)[0] for _ in range(count)]
    base, short = (server.ask(model, [said(question) for question in asked]) for model in (BASE, "short"))
    return sum(map(len, base)) / count, sum(map(len, short)) / count, sum(map(is_right, short)) / count


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
        exact = measure(partial(server.ask, "short"), "plain", args.questions)
        base, short, right = shortening(server, args.questions)
    missed = failures(results) + [line.replace("plain", "short", 1) for line in failures({"plain": exact})]
    if short > SHORTER_AT_MOST * base or right < RIGHT_AT_LEAST:
        missed.append(f"short: {short:.1f} characters an answer, the base {base:.1f}; {right:.0%} are right")
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in took.items())
    effect = (
        f"Characters of a story or of small talk: base {base:.1f}, short {short:.1f}, of which {right:.0%} are "
        f"right. Beside that:\n\n{table({'short': exact})}"
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
