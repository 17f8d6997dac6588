"""A tiny random model with the demo's tokenizer, and data that it can learn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from api.text.tokenizer import load_tokenizer
from demo.paths import demo_model
from testing.models.tiny import save_hf, tiny_model
from training.config import TrainConfig


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """Models of this size lose by more, and one machine's bits are compared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def save_chat_model(folder: Path, **shape) -> Path:
    """A tiny model with the demo's tokenizer and template."""
    save_hf(tiny_model(vocab_size=2048, **shape), folder)
    tokenizer = load_tokenizer(demo_model())
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": tokenizer.template.source, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="package")
def chat_model(tmp_path_factory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat-model"))


def _write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="package")
def talks(tmp_path_factory) -> Path:
    """24 rows of question and answer."""
    rows = [(f"What is {n} + 1?", f"{n} + 1 = {n + 1}.") for n in range(24)]
    messages = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in rows]
    return _write(tmp_path_factory.mktemp("data") / "talks.jsonl", [{"messages": m} for m in messages])


@pytest.fixture(scope="package")
def pairs(tmp_path_factory) -> Path:
    """Short answers are preferred."""
    rows = [
        {
            "prompt": f"What is {n} + 1?",
            "chosen": f"{n + 1}",
            "rejected": f"{n} + 1 = {n + 1}, as anyone can tell.",
        }
        for n in range(16)
    ]
    return _write(tmp_path_factory.mktemp("data") / "pairs.jsonl", rows)


@pytest.fixture
def config(chat_model, talks, tmp_path) -> TrainConfig:
    return TrainConfig(
        model_name_or_path=str(chat_model),
        dataset=(str(talks),),
        output_dir=str(tmp_path / "out"),
        cutoff_len=64,
        lora_rank=4,
        lora_alpha=8.0,
        learning_rate=5e-3,
        max_steps=6,
        save_steps=3,
        logging_steps=1,
        per_device_train_batch_size=2,
        device="cpu",
        plot_loss=False,
    )
