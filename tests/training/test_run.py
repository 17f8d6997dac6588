"""Whole runs: the loss of stock PEFT, bit for bit after a stop, and errors that say what to change."""

from __future__ import annotations

import json
import math
import shutil
import warnings
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch
from transformers import TrainingArguments

from engine.errors import UserError
from engine.lora.files.parse import parse_adapter
from engine.weights.open import open_model
from testing.models.mxfp4 import save_mxfp4
from testing.models.tiny import save_hf, tiny_model
from tests.training.conftest import save_chat_model
from tests.training.models import copy_lora, losses, ours, plain
from training import main
from training.data import build_datasets, load_tokenizer
from training.data.collate import PackingCollator, PaddingCollator
from training.kernels import expert_maker
from training.loop.arguments import common_arguments
from training.loop.progress import StopOnSignal, read_log
from training.loop.resume import TrainingError
from training.loop.trainer import Run, checkpoints
from training.run import Outcome, train


def test_fifty_steps_of_loss_are_those_of_peft_on_plain_transformers(config, chat_model):
    """Accumulation, clipping over attention and experts together, warm-up and schedule included."""
    config = replace(config, max_steps=50, gradient_accumulation_steps=2, warmup_steps=5, max_grad_norm=0.5)
    rows, _ = build_datasets(config, load_tokenizer(config))
    model = ours(chat_model, expert_maker(config))
    stock = plain(tiny_model(vocab_size=2048))
    copy_lora(model, stock)
    found = []
    for each, name in ((model, "ours"), (stock, "stock")):
        folder = config.output / name
        arguments = TrainingArguments(
            **common_arguments(replace(config, output_dir=str(folder), save_strategy="no"), "cpu")
        )
        trainer = Run(each, arguments, data_collator=PaddingCollator(0), train_dataset=rows)
        trainer.train()
        found.append([record["loss"] for record in trainer.state.log_history if "loss" in record])
    assert len(found[0]) == 50 and found[0][-1] < 0.5 * found[0][0]
    assert max(abs(a - b) for a, b in zip(*found, strict=True)) < 1e-4


def test_computing_again_changes_no_bit(config):
    """Gate and up computed again in the backward pass, instead of kept."""
    config = replace(config, save_strategy="no", bf16=True, max_steps=3)
    again = replace(config, kt_cpu_activation="recompute", output_dir=f"{config.output_dir}-again")
    for each in (config, again):
        train(each)
    assert losses(config.output) == losses(again.output)
    files = [folder / "adapter_model.safetensors" for folder in (config.output, again.output)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_experts_in_int8_are_trained_over_as_exact_ones_are(config):
    """The loss falls, and stays near that over the weights before they were rounded."""
    config = replace(config, save_strategy="no", max_steps=8)
    rounded = replace(config, kt_backend="AMXInt8", output_dir=f"{config.output_dir}-int8")
    for each in (config, rounded):
        train(each)
    want, got = losses(config.output), losses(rounded.output)
    assert got != want and got[-1] < 0.95 * got[0]
    assert max(abs(a - b) / a for a, b in zip(want, got, strict=True)) < 0.02


def test_experts_in_mxfp4_are_trained_over_as_the_values_that_they_are(config, tmp_path):
    """gpt-oss: of the files' own blocks, and of a folder with their values in float32."""
    plain, blocks = save_chat_model(tmp_path / "plain", family="gpt_oss"), tmp_path / "blocks"
    held = save_mxfp4(tiny_model(vocab_size=2048, family="gpt_oss"), blocks)
    for file in plain.glob("tokenizer*.json"):
        shutil.copy(file, blocks)
    save_hf(held, plain)
    found = []
    for folder in (plain, blocks):
        run = replace(
            config, model_name_or_path=str(folder), output_dir=str(tmp_path / f"out-{folder.name}"), packing=True,
            save_strategy="no", max_steps=4,
        )  # fmt: skip
        train(run)
        found.append(losses(run.output))
    assert found[0][-1] < found[0][0]
    assert max(abs(a - b) / a for a, b in zip(*found, strict=True)) < 0.005


@torch.no_grad()
def test_packed_samples_see_and_teach_nothing_of_one_another(config, chat_model):
    config = replace(config, cutoff_len=128, train_on_prompt=True)
    tokenizer = load_tokenizer(config)
    single, _ = build_datasets(config, tokenizer)
    packed, _ = build_datasets(replace(config, packing=True), tokenizer)
    model = ours(chat_model)
    alone = {}
    for item in (single[i] for i in range(len(single))):
        ids = torch.tensor([item["input_ids"]])
        alone[tuple(item["input_ids"])] = model(input_ids=ids).logits[0]
    batch = PackingCollator(0)([packed[i] for i in range(len(packed))])
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    count = 0
    for row, segments in enumerate(batch["segments"]):
        for segment in range(int(segments.max()) + 1):
            at = segments == segment
            want = alone[tuple(batch["input_ids"][row][at].tolist())]
            torch.testing.assert_close(logits[row][at], want, rtol=1e-5, atol=1e-5)
            assert batch["labels"][row][at][0] == -100  # else the sample before would have to foretell it
            count += 1
    assert count == len(single) > len(packed)


def test_preferences_move_apart(config, pairs, tmp_path):
    """The reference is the base with the adapter off: the first margin is 0, and it grows."""
    pytest.importorskip("trl", reason="stage: dpo needs trl")
    config = replace(config, stage="dpo", dataset=(str(pairs),), max_steps=8, learning_rate=1e-2, bf16=True)
    outcome = train(replace(config, adapter_format="kt-fused"))
    margins = [record["rewards/margins"] for record in read_log(config.output / "log.jsonl")]
    assert margins[0] == 0.0 and losses(config.output)[0] == pytest.approx(math.log(2), abs=1e-6)
    assert margins[-1] > 0.2
    read = parse_adapter(outcome.folders["default"], open_model(config.model_name_or_path).config, name="a")
    assert read.format == "kt-fused" and read.experts[0].gate_a.dtype == torch.bfloat16


def test_early_stop_keeps_the_lowest_evaluation_loss(config):
    config = replace(
        config, val_size=4, eval_strategy="steps", eval_steps=1, save_steps=1, early_stopping_steps=2,
        learning_rate=0.5, max_steps=12,
    )  # fmt: skip
    train(config)
    records = [record for record in read_log(config.output / "log.jsonl") if "eval_loss" in record]
    assert len(records) < 12
    best = min(records, key=lambda record: record["eval_loss"])["step"]
    state = json.loads((checkpoints(config.output)[-1] / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(config.output / f"checkpoint-{best}")


def test_a_loss_that_is_no_number_ends_the_run(config):
    with pytest.raises(TrainingError, match=r"step \d: the loss is (nan|inf).*lower learning_rate"):
        train(replace(config, learning_rate=10.0, adam_epsilon=0.0, max_grad_norm=0.0, max_steps=40))
    assert not (config.output / "adapter_config.json").exists()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"resume_from_checkpoint": "true"}, "no checkpoint to resume from"),
        ({"resume_from_checkpoint": "/nowhere"}, "/nowhere: no checkpoint"),
        ({"device": "cuda"}, "device: cuda"),
        ({"lora_dropout": 0.1}, "lora_dropout is 0.1"),
        ({"cutoff_len": 1 << 22}, "the training run does not fit"),
        ({"model_name_or_path": "/nowhere"}, "/nowhere"),
    ],
)
def test_what_cannot_be_is_named(config, change, match):
    if "device" in change and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match=match):
        train(replace(config, **change))


def test_an_output_folder_that_is_not_empty(config):
    (config.output / "checkpoint-9").mkdir(parents=True)
    (config.output / "something").write_text("")
    with pytest.raises(UserError, match="holds checkpoint-9, something: give another"):
        train(config)
    train(replace(config, overwrite_output_dir=True, max_steps=1, save_strategy="no"))
    assert not checkpoints(config.output)  # another run's


def test_only_the_warning_of_peft_is_left_out(config, monkeypatch):
    def warned(*_, **__) -> Outcome:
        for name in ("is_gradient_checkpointing", "other"):
            warnings.warn(f"`{name}` is deprecated and will be removed", FutureWarning, stacklevel=1)
        return Outcome({}, False, 0.0)

    monkeypatch.setattr("training.run.train", warned)
    monkeypatch.setattr(StopOnSignal, "install", lambda self: None)
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert main._run(config, None, None) == 0
    assert ["`other`" in str(warning.message) for warning in caught] == [True]


def test_the_curve(config):
    train(replace(config, max_steps=2, save_strategy="no", plot_loss=True))
    assert ElementTree.parse(config.output / "loss.svg").getroot().findall("{*}polyline")
    first = read_log(config.output / "log.jsonl")[0]
    assert first["tokens"] > 0 and first["tokens_per_s"] > 0
