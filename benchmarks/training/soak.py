"""A thousand steps of a whole run on a tiny model: the memory of the process must not grow with them.

python -m benchmarks.training.soak [--steps N] [--together]

Prints the resident memory every tenth of the run; the exit status is 1 if it grows by more than 4 MB in the second
half. --together: three adapters in one batch.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from api.text.tokenizer import load_tokenizer
from demo.paths import demo_model
from testing.models.tiny import save_hf, tiny_model
from training.config import TrainConfig
from training.loop.progress import StopOnSignal
from training.run import train

MOST_GROWTH = 4 << 20


class Watch(StopOnSignal):
    """Notes the resident memory while a run asks whether to stop."""

    def __init__(self, every: int) -> None:
        self.every, self.looks, self.bytes = every, 0, list[int]()
        super().__init__()

    @property
    def asked(self) -> bool:
        self.looks += 1
        if self.looks % self.every == 0:
            gc.collect()
            self.bytes.append(psutil.Process().memory_info().rss)
            print(f"{self.looks:>6} steps: {self.bytes[-1] / 1e6:.1f} MB", file=sys.stderr, flush=True)
        return False

    @asked.setter
    def asked(self, value: bool) -> None:
        """No signal is waited for."""


def model_with_chat(folder: Path) -> None:
    """A tiny random model with the demo's tokenizer."""
    save_hf(tiny_model(vocab_size=2048), folder)
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """The demo's, for a model of any vocabulary from 2048 tokens on."""
    tokenizer = load_tokenizer(demo_model())
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    assert tokenizer.template is not None
    settings = {"chat_template": tokenizer.template.source, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.soak")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--together", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_with_chat(folder / "model")
        rows = [(f"What is {n} + 1?", f"{n} + 1 = {n + 1}.") for n in range(40)]
        messages = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in rows]
        (folder / "talks.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages))
        config = TrainConfig(
            model_name_or_path=str(folder / "model"), dataset=(str(folder / "talks.jsonl"),), device="cpu",
            output_dir=str(folder / "out"), cutoff_len=64, max_steps=args.steps, num_train_epochs=None,
            save_steps=max(args.steps // 4, 1), save_total_limit=1, logging_steps=10, plot_loss=False,
            kt_num_threads=1, lora_rank=4,
        )  # fmt: skip
        if args.together:
            members = tuple(replace(config, adapter_name=f"a{i}", lora_rank=2 + i) for i in range(3))
            config = replace(config, adapters=members)
        watch = Watch(max(args.steps // 10, 1))
        train(config, stop=watch)
    grown = watch.bytes[-1] - watch.bytes[len(watch.bytes) // 2]
    print(f"grown by {grown / 1e6:.2f} MB in the second half of {args.steps} steps", file=sys.stderr)
    return int(grown > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
