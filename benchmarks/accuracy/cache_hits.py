"""How often a greedy answer changes when its prompt is found in the prefix cache: each prompt twice, alone each time.

    python -m benchmarks.accuracy.cache_hits [--model MODEL] [--prompts 200] [--tokens 32] [--layers 8] [--out FILE]

A prompt that is found is computed as a few rows, one that is not as many; where kernels of many rows round otherwise
(AMX, quantised weights; docs/native.md), a near-tie may fall otherwise. Prompts are drawn from the model itself, so
that they are what it knows. With and without `--deterministic`, whose cost `--layers` measures: prompts of 512 and 2048
on a model of Qwen3-30B-A3B's shape, both engines in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.cpu.engine import BenchEngine
from benchmarks.cpu.state import describe_machine, versions
from benchmarks.models.make import model_path, write_model
from benchmarks.models.shapes import Shape
from demo.paths import demo_model
from testing.harness import Harness

LENGTHS = (40, 90, 170)  # tokens of a prompt
SETTINGS = {"default": False, "deterministic": True}


def measure(model: str, deterministic: bool, count: int, tokens: int) -> dict[str, Any]:
    engine = Harness(
        Path(model), dtype="auto", rules=None, cpu_threads=None, kv_cache_tokens=65536, deterministic=deterministic,
        pack_cache="off",
    )  # fmt: skip
    vocabulary = engine.plan.source.config.vocab_size
    changed = compared = 0
    rates: list[float] = []
    for number in range(count):
        start = [(7919 * number + 31 * i * i + 5) % vocabulary for i in range(3)]
        length = LENGTHS[number % len(LENGTHS)]
        settings: dict[str, Any] = {"temperature": 1.0, "seed": number, "ignore_eos": True}
        prompt = start + engine.generate([start], max_tokens=length, **settings)[0]
        prompt = [7 + number % (vocabulary - 8), *prompt[1:]]  # nothing of it is in the cache
        began = time.perf_counter()
        engine.generate([prompt], max_tokens=1, ignore_eos=True)
        rates.append(len(prompt) / (time.perf_counter() - began))
        other = [11 + number % (vocabulary - 12), *prompt[1:]]
        answers = [engine.generate([other], max_tokens=tokens, ignore_eos=True)[0] for _ in range(2)]
        compared, changed = compared + 1, changed + (answers[0] != answers[1])
    engine.close()
    return {"prompts": compared, "changed": changed, "prefill_tok_s": statistics.median(rates)}


def prefill(layers: int, mix: str, rounds: int = 5) -> dict[str, Any]:
    """Tokens a second of a prompt with each setting, and their ratio, by the prompt's length."""
    found: dict[str, Any] = {}
    shape = Shape(layers=layers)
    with tempfile.TemporaryDirectory(prefix="ktserve-cache-hits-") as folder:
        path = model_path(Path(folder), layers, mix)
        write_model(path, shape, mix)
        threads = len(os.sched_getaffinity(0))
        engines = {
            name: BenchEngine(path, shape, mix, threads, deterministic=value) for name, value in SETTINGS.items()
        }
        for length in (512, 2048):
            rates: dict[str, list[float]] = {name: [] for name in engines}
            for turn in range(rounds + 1):  # the first warms up
                for name, engine in engines.items():
                    rate = length / engine.prefill(length)
                    if turn:
                        rates[name].append(rate)
            medians = {name: statistics.median(values) for name, values in rates.items()}
            found[f"{mix} prefill {length}"] = medians | {"ratio": medians["deterministic"] / medians["default"]}
        for engine in engines.values():
            engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(demo_model()))
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument(
        "--layers", type=int, help="measure what --deterministic costs too, on a model of so many layers"
    )
    parser.add_argument("--mix", default="Q8_0", help="weights of that model")
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    results: dict[str, Any] = {"machine": describe_machine(None), "versions": versions(None)}
    for name, deterministic in SETTINGS.items():
        results[name] = measure(args.model, deterministic, args.prompts, args.tokens)
        print(name, json.dumps(results[name]), flush=True)
    if args.layers:
        results["prefill"] = prefill(args.layers, args.mix)
        print("prefill", json.dumps(results["prefill"]), flush=True)
    if args.out:
        record.write(args.out, results)


if __name__ == "__main__":
    main()
