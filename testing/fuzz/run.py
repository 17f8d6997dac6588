"""Minutes of mutated files for every reader, and of requests for a server of its own. Ends with status 1 if a file or a
request did not end as docs/robustness.md promises.

    make fuzz [ARGS="--minutes 2 --seed 7"]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
import transformers

from demo.paths import ADAPTERS, HERE
from loadtests.chaos.server import serving
from testing.fuzz.corpus import fuzz
from testing.fuzz.http import Tally, fuzz_bodies, fuzz_document
from testing.fuzz.readers import READERS

_KEY = "fuzz-admin"
_SERVE = ("--log-level", "warning", "--pack-cache", "off", "--kv-cache-tokens", "8192", "--request-timeout-s", "120")
_OF_FILES = 0.5  # of the time


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the summary, as Markdown")
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="folder for files that did not end well")
    args = parser.parse_args(argv)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # readers run in forks
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    rng, seconds = Random(args.seed), args.minutes * 60
    files = [fuzz(reader, seconds * _OF_FILES / len(READERS), rng, args.keep) for reader in READERS]
    with tempfile.TemporaryDirectory(prefix="ktfuzz-") as folder:
        root = HERE / "adapters"
        flags = (*_SERVE, "--fine-tuning", "--data-dir", f"{folder}/data", "--adapter-root", str(root))
        with serving(Path(folder) / "log", flags, _KEY) as (_, target):
            of_requests = seconds * (1 - _OF_FILES) / 2
            requests = [
                fuzz_document(target, root / ADAPTERS[0], of_requests, rng),
                fuzz_bodies(target, of_requests, rng),
            ]
        log = (Path(folder) / "log").read_text(errors="replace")
    faults = [fault for tally in files for fault in tally.faults]
    faults += [f"{fault} ({example})" for tally in requests for fault, example in tally.faults.items()]
    if found := _traceback(log):
        faults.append(f"the server logged a traceback:\n{found}")
    lines = [
        f"{args.minutes:g} minutes, seed {args.seed}",
        "",
        "| mutated files | how they ended | of kinds |",
        "|---|---|---|",
    ]
    lines += [f"| {tally.name} | {_counts(tally.ends)} | {len(tally.signatures)} |" for tally in files]
    for title, tally in zip(("requests by the document", "requests by hand"), requests, strict=True):
        lines += ["", f"| {title} | statuses |", "|---|---|", *_rows(tally)]
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for fault in faults:
        print(f"broken: {fault}")
    return 1 if faults else 0


def _traceback(log: str) -> str:
    """The first one, with the lines around it; empty if there is none."""
    lines = log.splitlines()
    at = next((i for i, line in enumerate(lines) if "Traceback" in line), None)
    return "" if at is None else "\n".join(lines[max(0, at - 5) : at + 60])


def _rows(tally: Tally) -> list[str]:
    return [f"| {place} | {_counts(ends)} |" for place, ends in sorted(tally.ends.items())]


def _counts(ends: dict[str, int]) -> str:
    return ", ".join(f"{count:,} x {end}" for end, count in sorted(ends.items(), key=lambda item: -item[1]))


if __name__ == "__main__":
    sys.exit(main())
