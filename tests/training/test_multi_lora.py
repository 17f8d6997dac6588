"""Several adapters in one batch: each is what it is alone."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import UserError
from tests.training.models import losses
from training.config import TrainConfig
from training.loop.progress import StopOnSignal
from training.loop.resume import TrainingError
from training.loop.trainer import checkpoints
from training.run import train


@pytest.fixture
def several(config, talks, tmp_path) -> TrainConfig:
    """Three adapters that differ in all that they may; two leave the batch before the last step."""
    some = tmp_path / "some.jsonl"
    some.write_text("".join(talks.read_text().splitlines(keepends=True)[5:12]))
    base = replace(config, gradient_accumulation_steps=2, max_grad_norm=0.5, weight_decay=0.01, adam_epsilon=1e-6)
    runs = (
        replace(base, adapter_name="first.v1", lora_rank=2, lora_alpha=4.0, lr_scheduler_type="cosine"),
        replace(base, adapter_name="second", dataset=(str(some),), max_steps=None, num_train_epochs=2.0),
        replace(
            base, adapter_name="third", lora_rank=8, lora_alpha=8.0, learning_rate=2e-3, max_steps=3, warmup_steps=2
        ),
    )
    return replace(base, adapters=runs)


@pytest.mark.parametrize(
    "change",
    [{}, {"packing": True, "gradient_checkpointing": True, "lora_target": ("q_proj", "up_proj", "down_proj")}],
    ids=["padded", "packed"],
)
def test_each_is_trained_as_if_it_were_alone(several, tmp_path, change):
    """Losses and weights of N adapters in one batch against a run of each, in float32."""
    runs = tuple(replace(run, **change) for run in several.adapters)
    several = replace(several, **change, adapters=runs, save_strategy="no")
    outcome = train(several)
    assert set(outcome.folders) == {"first.v1", "second", "third"}
    for run in several.adapters:
        alone = replace(run, output_dir=str(tmp_path / f"alone-{run.adapter_name}"), save_strategy="no")
        train(alone)
        folder = outcome.folders[run.adapter_name]
        want, got = losses(alone.output), losses(folder)
        assert len(want) == len(got) >= 2
        assert max(abs(a - b) for a, b in zip(want, got, strict=True)) < 1e-6
        files = [load_file(each / "adapter_model.safetensors") for each in (alone.output, folder)]
        assert set(files[0]) == set(files[1])
        assert any(tensor.any() for name, tensor in files[0].items() if "lora_B" in name)
        difference = sum(float((files[0][name] - files[1][name]).abs().sum()) for name in files[0])
        assert difference < 1e-6 * sum(float(tensor.abs().sum()) for tensor in files[0].values())


def test_a_stop_is_gone_on_from_bit_for_bit(several, tmp_path):
    whole = replace(several, output_dir=str(tmp_path / "whole"))
    whole = replace(whole, adapters=tuple(replace(run, output_dir=whole.output_dir) for run in several.adapters))
    train(whole)

    class AtOnce(StopOnSignal):
        def install(self) -> None:
            super().install()
            os.kill(os.getpid(), signal.SIGINT)

    stop = AtOnce()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stop.install()
    try:
        outcome = train(several, stop=stop)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert outcome.stopped and not outcome.folders
    assert [path.name for path in checkpoints(several.output)] == ["checkpoint-1"]
    torch.manual_seed(99)
    outcome = train(replace(several, resume_from_checkpoint="true"))
    for run in several.adapters:
        folders = [whole.output / run.adapter_name, outcome.folders[run.adapter_name]]
        assert losses(folders[0]) == losses(folders[1])
        first, second = ((folder / "adapter_model.safetensors").read_bytes() for folder in folders)
        assert first == second


def test_a_loss_that_is_no_number_names_the_adapter(several):
    broken = replace(several.adapters[2], learning_rate=10.0, adam_epsilon=0.0, max_steps=40)
    runs = (several.adapters[0], replace(broken, warmup_steps=0))
    with pytest.raises(TrainingError, match=r"third, step \d+: the loss is (nan|inf)"):
        train(replace(several, max_grad_norm=0.0, adapters=tuple(replace(run, max_grad_norm=0.0) for run in runs)))
    assert not list(several.output.glob("*/adapter_config.json"))


def test_another_run_s_checkpoint_is_refused(several):
    train(replace(several, adapters=several.adapters[2:]))
    again = {"resume_from_checkpoint": "true"}
    with pytest.raises(UserError, match="is of the adapters third, the configuration's are first"):
        train(replace(several, **again))
    other = (replace(several.adapters[2], lora_rank=4),)
    with pytest.raises(UserError, match="lora_rank 8, the configuration's is 4"):
        train(replace(several, adapters=other, **again))
    with pytest.raises(UserError, match=r"members\.pt is missing"):
        folder = checkpoints(several.output)[-1]
        (folder / "members.pt").unlink()
        train(replace(several, adapters=several.adapters[2:], **again))
