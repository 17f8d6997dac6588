"""Fine-tuning beside serving: p95 between tokens of live streams alone and beside runs that train, tokens a second of
1, 4 and 8 runs with the same tokens in all, and rounds of reinforcement learning with their parts.

    python -m benchmarks.training.service [--seconds 60 --tokens 16384 --rounds 20]
    python -m benchmarks.models.make --out DIR --layers 8 --type Q8_0
    python -m benchmarks.training.service --model DIR/qwen3-30b-a3b-8L-Q8_0.gguf --flags=--max-num-seqs=32

On a machine that does nothing else. Needs Tinker's client (make test-clients installs it). Beside it, the rate of
`ktserve train` with as many tokens in a step.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import httpx
import tinker
from tinker import types

from benchmarks import record
from benchmarks.report.serving import tuning
from demo.paths import demo_model
from demo.tuning.data import talks
from demo.tuning.policy import ASKED, rounds
from ktserve.launcher import program
from loadtests.chaos.server import serving
from training.loop.progress import LOG, read_log

_MODEL, _KEY = "demo", "service-bench"
_LENGTH = 256  # tokens of a text
_STREAMS, _ANSWER = 4, 64
T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.service")
    parser.add_argument("--model", type=Path, help="default: the demo's")
    parser.add_argument("--flags", default="", help="of `ktserve serve`, more of them")
    parser.add_argument("--train-device", default="cpu", help="of `ktserve train`")
    parser.add_argument("--seconds", type=float, default=60.0, help="of live streams, alone and beside training each")
    parser.add_argument("--tokens", type=int, default=16384, help="of all runs together, in a step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--answers", type=int, default=32, help="in a round")
    parser.add_argument("--out", type=Path, help="a JSON file of benchmarks/results")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="ktservice-") as folder:
        # Before Tinker's client is made: its threads ask for its server until the process ends.
        template = Path(folder) / "template.jinja"
        template.write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
        command = _said(_command(Path(folder), args, template))
        flags = ["--fine-tuning", "--data-dir", f"{folder}/data", "--pack-cache", "off", *args.flags.split()]
        if args.model is not None:
            flags = [str(args.model), "--served-model-name", _MODEL, "--chat-template", str(template), *flags]
        with serving(Path(folder) / "log", flags, _KEY) as (_, server):
            client = tinker.ServiceClient(base_url=server.url, api_key=f"tml-{_KEY}")
            live = _said(_live(server.url, client, args.seconds))
            rates = [
                _said(
                    {
                        "what": f"{count} of the service's runs",
                        "tokens_s": _rate(client, count, args.tokens, args.steps),
                    }
                )
                for count in args.runs
            ]
            policy = _policy(server.url, args)
        rates.append({"what": "`ktserve train`", "tokens_s": command})
    data = {"live": live, "rates": rates, "answers": args.answers, **policy}
    print(tuning(data))
    if args.out:
        record.write(args.out, data)
    return 0


def _said(found: T) -> T:
    """A run takes minutes."""
    print(found, file=sys.stderr, flush=True)
    return found


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


def _live(url: str, client: tinker.ServiceClient, seconds: float) -> list[dict[str, Any]]:
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
    return [
        {
            "what": name,
            "p50_s": statistics.median(gaps),
            "p95_s": statistics.quantiles(gaps, n=20)[-1],
            "tokens": len(gaps),
        }
        for name, gaps in (("alone", alone), ("beside a run", beside))
    ]


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


def _policy(url: str, args: argparse.Namespace) -> dict[str, Any]:
    """A random model's answers are to have odd tokens."""
    reward = None if args.model is None else lambda tokens: sum(token % 2 for token in tokens) / len(tokens)
    question = {"model": _MODEL, "messages": [{"role": "user", "content": ASKED}]}
    asked = httpx.post(f"{url}/tokenize", json=question, headers={"Authorization": f"Bearer {_KEY}"})
    prompt = asked.raise_for_status().json()["tokens"]
    began = time.perf_counter()
    found = list(rounds(url, _KEY, _MODEL, prompt, args.rounds, args.answers, reward=reward))
    took = time.perf_counter() - began
    parts = ("sampling", "batch", "step", "publish")
    return {
        "round": {part: statistics.median(getattr(each, f"{part}_s") for each in found) for part in parts},
        "rounds_a_minute": 60 * len(found) / took,
    }


def _command(folder: Path, args: argparse.Namespace, template: Path) -> float:
    """Tokens a second of `ktserve train` with the demo's texts, packed to _LENGTH; the first step apart."""
    texts, output, tokens, steps = folder / "texts.jsonl", folder / "trained", args.tokens, args.steps
    texts.write_text("".join(json.dumps(row) + "\n" for row in talks("pirate", 40 * tokens * steps // _LENGTH)))
    settings = {
        "model_name_or_path": str(args.model or demo_model()),
        "template": "auto" if args.model is None else str(template),
        "dataset": str(texts),
        "output_dir": str(output),
        "lora_rank": 16,
        "packing": True,
        "cutoff_len": _LENGTH,
        "overlong": "drop",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": max(1, tokens // _LENGTH // 4),
        "max_steps": steps + 1,
        "save_strategy": "no",
        "logging_steps": 1,
        "device": args.train_device,
    }
    config = folder / "train.yaml"
    config.write_text(json.dumps(settings))  # JSON is YAML
    subprocess.run(program("train", str(config)), check=True, stdout=subprocess.DEVNULL)
    return statistics.median(float(record["tokens_per_s"]) for record in read_log(output / LOG)[1:])


if __name__ == "__main__":
    sys.exit(main())
