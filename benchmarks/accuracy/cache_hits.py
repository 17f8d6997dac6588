"""How often a greedy answer changes when its prompt is found in the prefix cache: each prompt twice, alone each time.

    python -m benchmarks.accuracy.cache_hits [--model MODEL] [--prompts 200] [--tokens 32] [--out FILE]

A prompt that is found is computed as a few rows, one that is not as many; where kernels of many rows round otherwise
(AMX, quantised weights; docs/native.md), a near-tie may fall otherwise. Prompts are drawn from the model itself, so
that they are what it knows. With and without `--deterministic`; `speed` is that of prefill.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.cpu.state import commit, describe_machine, versions
from demo.paths import demo_model
from testing.harness import Harness

LENGTHS = (40, 90, 170)  # tokens of a prompt


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(demo_model()))
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    results: dict[str, Any] = {"commit": commit(), "machine": describe_machine(None), "versions": versions(None)}
    for name, deterministic in (("default", False), ("deterministic", True)):
        results[name] = measure(args.model, deterministic, args.prompts, args.tokens)
        print(name, json.dumps(results[name]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
