"""Fine-tuning beside serving, on the demo model: p95 between tokens of live streams alone and beside runs that train,
tokens a second of 1, 4 and 8 runs with the same tokens in all, and rounds of reinforcement learning with their parts.

    python -m benchmarks.training.service [--seconds 60 --tokens 16384 --rounds 20]

On a machine that does nothing else. Needs Tinker's client (make test-clients installs it). The rate of `ktserve train`
to compare with is what it prints of a job with the same texts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import tinker
from tinker import types

from demo.tuning.policy import ASKED, rounds
from loadtests.chaos.server import serving

_MODEL, _KEY = "demo", "service-bench"
_LENGTH = 256  # tokens of a text
_STREAMS, _ANSWER = 4, 64


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.service")
    parser.add_argument("--seconds", type=float, default=60.0, help="of live streams, alone and beside training each")
    parser.add_argument("--tokens", type=int, default=16384, help="of all runs together, in a step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--answers", type=int, default=32, help="in a round")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="ktservice-") as folder:
        flags = ["--fine-tuning", "--data-dir", f"{folder}/data", "--pack-cache", "off"]
        with serving(Path(folder) / "log", flags, _KEY) as (_, server):
            client = tinker.ServiceClient(base_url=server.url, api_key=f"tml-{_KEY}")
            _live(server.url, client, args.seconds)
            print("\n| runs | tokens/s of all |\n|---|---|")
            for count in args.runs:
                print(f"| {count} | {_rate(client, count, args.tokens, args.steps):.0f} |")
            _policy(server.url, args.rounds, args.answers)
    return 0


def _opened(client: tinker.ServiceClient, count: int) -> list[Any]:
    return [client.create_lora_training_client(base_model=_MODEL, rank=16, seed=seed).result() for seed in range(count)]


def _texts(count: int) -> list[types.Datum]:
    rng = random.Random(count)
    found = []
    for _ in range(count):
        text = [rng.randrange(1000) for _ in range(_LENGTH + 1)]
        inputs: Any = {"target_tokens": text[1:], "weights": [1.0] * _LENGTH}
        found.append(types.Datum(model_input=types.ModelInput.from_ints(text[:-1]), loss_fn_inputs=inputs))
    return found


def _step(runs: Sequence[Any], data: list[types.Datum]) -> None:
    asked = [run.forward_backward(data, "cross_entropy") for run in runs]
    stepped = [run.optim_step(types.AdamParams(learning_rate=1e-4)) for run in runs]
    for future in (*asked, *stepped):
        future.result()


def _rate(client: tinker.ServiceClient, count: int, tokens: int, steps: int) -> float:
    """Tokens a second of `count` runs, whose batches have so many `tokens` together."""
    runs, data = _opened(client, count), _texts(max(1, tokens // _LENGTH // count))
    _step(runs, data)
    began = time.perf_counter()
    for _ in range(steps):
        _step(runs, data)
    took = time.perf_counter() - began
    return steps * count * len(data) * _LENGTH / took


def _live(url: str, client: tinker.ServiceClient, seconds: float) -> None:
    alone = _gaps(url, seconds)
    over, runs, data = threading.Event(), _opened(client, 1), _texts(16)

    def train() -> None:
        while not over.is_set():
            _step(runs, data)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        beside = _gaps(url, seconds)
    finally:
        over.set()
        trainer.join()
    print("| live streams | p50 ms between tokens | p95 ms | tokens |\n|---|---|---|---|")
    for name, gaps in (("alone", alone), ("beside a run", beside)):
        middle, high = statistics.median(gaps), statistics.quantiles(gaps, n=20)[-1]
        print(f"| {name} | {1000 * middle:.2f} | {1000 * high:.2f} | {len(gaps)} |")


def _gaps(url: str, seconds: float) -> list[float]:
    """Seconds between the tokens of some streams at a time."""
    until = time.perf_counter() + seconds

    def stream(_: int) -> list[float]:
        found: list[float] = []
        body = {"model": _MODEL, "prompt": "Once upon a time", "max_tokens": _ANSWER, "stream": True}
        with httpx.Client(timeout=600.0, headers={"Authorization": f"Bearer {_KEY}"}) as client:
            while time.perf_counter() < until or not found:
                with client.stream("POST", f"{url}/v1/completions", json=body | {"ignore_eos": True}) as answer:
                    answer.raise_for_status()
                    times = [time.perf_counter() for line in answer.iter_lines() if line.startswith("data: {")]
                found += [after - before for before, after in pairwise(times)]
        return found

    with ThreadPoolExecutor(_STREAMS) as threads:
        return [gap for gaps in threads.map(stream, range(_STREAMS)) for gap in gaps]


def _policy(url: str, count: int, answers: int) -> None:
    question = {"model": _MODEL, "messages": [{"role": "user", "content": ASKED}]}
    asked = httpx.post(f"{url}/tokenize", json=question, headers={"Authorization": f"Bearer {_KEY}"})
    prompt = asked.raise_for_status().json()["tokens"]
    began = time.perf_counter()
    found = list(rounds(url, _KEY, _MODEL, prompt, count, answers))
    took = time.perf_counter() - began
    print("\n| part of a round | median ms |\n|---|---|")
    for part in ("sampling_s", "batch_s", "step_s", "publish_s"):
        print(f"| {part.removesuffix('_s')} | {1000 * statistics.median(getattr(each, part) for each in found):.0f} |")
    print(f"\n{60 * len(found) / took:.1f} rounds a minute with {answers} answers each")


if __name__ == "__main__":
    sys.exit(main())
