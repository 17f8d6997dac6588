"""The first seconds of `ktserve serve`: until it listens, the first answer, and the first burst beside the same later.

    python -m benchmarks.serving.starts MODEL [--serve="--pack-cache DIR"] [--repeats 2] [--streams 32] [--out FILE]

The server is started again and again with the same flags. The first starts are asked for one prompt of --prompt tokens
as soon as /health answers, twice; the others for a burst of --streams prompts of 64 tokens, then for two more. Whether
the first start packs weights is a matter of what --pack-cache has. MODEL "demo" is the embedded model, which needs no
file. Stages are the lines that the server printed, with the seconds at which they came.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.client import Burst, burst, free_port, our_request
from loadtests.child import ServerError, ended_after, wait_ready

BURST_PROMPT, TOKENS, BURSTS = 64, 8, 3
_START_S = 1200.0
_HERE = f"{Path(__file__).parents[2]}/"  # a result says nothing of where the checkout lies


@dataclass
class Start:
    """A server that listens at `url`; seconds from the command on. `lines`: when each came."""

    url: str
    health_s: float = 0.0
    lines: list[tuple[float, str]] = field(default_factory=list)


@contextmanager
def started(model: str, flags: Sequence[str]) -> Iterator[Start]:
    """ServerError if it does not start."""
    port = free_port()
    command = [sys.executable, "-m", "api.cli.main", "serve", *([] if model == "demo" else [model])]
    command += ["--served-model-name", "base", "--port", str(port), *flags]
    read, write = os.pipe()
    start, began = Start(f"http://127.0.0.1:{port}"), time.perf_counter()

    def listen() -> None:
        with os.fdopen(read, "rb") as output:
            for line in output:
                text = line.decode(errors="replace").rstrip().replace(_HERE, "")
                start.lines.append((round(time.perf_counter() - began, 2), text))

    reader = threading.Thread(target=listen)
    with os.fdopen(write, "wb") as output, ended_after(command, output=output) as process:
        reader.start()
        try:
            wait_ready(process, f"{start.url}/health", _START_S)
        except ServerError as error:
            last = "\n".join(line for _, line in start.lines[-5:])
            raise ServerError(f"{error}\n{last}") from None
        start.health_s = time.perf_counter() - began
        yield start
    reader.join()


def requests(count: int, length: int, seed: int) -> list[Any]:
    """Of drawn tokens, so that no prompt begins as one before it."""
    rng = random.Random(seed)
    return [our_request([rng.randrange(5, 1000) for _ in range(length)], TOKENS, None) for _ in range(count)]


def _last(seen: Burst) -> float:
    return max(seen.ttft_s)


def measured(model: str, flags: Sequence[str], prompt: int, streams: int) -> dict[str, Any]:
    """One start. `streams` 0: then one prompt and another; else bursts."""
    with started(model, flags) as start:
        listened = start.lines[:]
        if streams:
            lasts = [_last(burst(start.url, requests(streams, BURST_PROMPT, i), TOKENS)) for i in range(BURSTS)]
        else:
            lasts = [_last(burst(start.url, requests(1, prompt, i), TOKENS)) for i in range(2)]
        return {"health_s": start.health_s, "last_first_token_s": lasts, "stages": listened}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder, .gguf, or demo")
    parser.add_argument("--serve", type=shlex.split, default=[], help="flags of `ktserve serve`, in one argument")
    parser.add_argument("--repeats", type=int, default=2, help="starts for a prompt, and as many for bursts")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {"prompt": [], "burst": []}
    for what, starts in results.items():
        for _ in range(args.repeats):
            found = measured(args.model, args.serve, args.prompt, args.streams if what == "burst" else 0)
            starts.append(found)
            firsts = ", ".join(f"{seconds:.2f}" for seconds in found["last_first_token_s"])
            print(f"{what}: /health after {found['health_s']:.2f} s, last first token after {firsts} s", flush=True)
    ratios = [(first := start["last_first_token_s"])[0] / statistics.median(first[1:]) for start in results["burst"]]
    if ratios:
        print(f"first burst over later ones: {statistics.median(ratios):.2f}")
    if args.out:
        about = {"model": Path(args.model).name, "flags": args.serve, "prompt": args.prompt, "streams": args.streams}
        record.write(args.out, {"about": about, "results": results})


if __name__ == "__main__":
    main()
