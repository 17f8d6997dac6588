"""A run that was stopped goes on as if it had not been, or is refused; what cannot be written leaves nothing half."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from engine.errors import UserError
from engine.lora.files.parse import parse_adapter
from engine.weights.open import open_model
from tests.training.models import losses
from training.loop.progress import StopOnSignal, read_log
from training.loop.resume import TrainingError, opened
from training.loop.trainer import checkpoints
from training.run import train

_TIMES = ("tokens_per_s", "of_peak", "remaining_s", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


def records(output: Path) -> list[dict]:
    """Of a run's log, without times."""
    return [{key: value for key, value in r.items() if key not in _TIMES} for r in read_log(output / "log.jsonl")]


class StopIn(StopOnSignal):
    """As if Ctrl-C were pressed in a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def on_step_begin(self, args, state, control, **_):
        self.asked |= state.global_step + 1 == self._step


def goes_on(config, *steps: int) -> None:
    """Stopped in one of `steps` and resumed it logs and writes what it does in one go."""
    whole = replace(config, output_dir=f"{config.output_dir}-whole")
    train(whole)
    for step in steps:
        part = replace(config, output_dir=f"{config.output_dir}-{step}")
        assert train(part, stop=StopIn(step)).stopped
        torch.manual_seed(99)
        train(replace(part, resume_from_checkpoint="true"))
        assert records(part.output) == records(whole.output)
        files = [folder / "adapter_model.safetensors" for folder in (part.output, whole.output)]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_a_run_that_was_stopped_goes_on_bit_for_bit(config):
    config = replace(config, packing=True, gradient_checkpointing=True, lr_scheduler_type="cosine", save_total_limit=1)
    whole = replace(config, output_dir=f"{config.output_dir}-whole")
    train(whole)
    stop = StopOnSignal()

    class AfterTwo(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 1:
                os.kill(os.getpid(), signal.SIGINT)

    stop.on_step_begin = AfterTwo().on_step_begin
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stop.install()
    try:
        outcome = train(config, stop=stop)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert outcome.stopped and not outcome.folders
    assert [path.name for path in checkpoints(config.output)] == ["checkpoint-2"]
    torch.manual_seed(99)
    for name in (".partial/checkpoint-3", ".checkpoint-1.removed"):  # as a kill leaves them
        (config.output / name).mkdir(parents=True)
    outcome = train(replace(config, resume_from_checkpoint="true"))
    assert not [path.name for path in config.output.iterdir() if path.name.startswith(".")]
    assert losses(config.output) == losses(whole.output)
    files = [folder / "adapter_model.safetensors" for folder in (config.output, whole.output)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert [path.name for path in checkpoints(config.output)] == ["checkpoint-6"]
    read = parse_adapter(config.output, open_model(config.model_name_or_path).config, name="a")
    assert read.format == "peft-per-expert" and sorted(read.experts) == [0, 1]


def test_a_stop_between_two_records_of_the_log(config):
    """Dropout on attention, micro-batches of several samples, an epoch's short last step."""
    goes_on(
        replace(
            config, logging_steps=4, max_steps=None, num_train_epochs=2.0, gradient_accumulation_steps=5,
            lora_target=("q_proj", "v_proj"), lora_dropout=0.2,
        ),
        3,
    )  # fmt: skip


def test_a_stop_between_two_records_of_preferences(config, pairs):
    pytest.importorskip("trl", reason="stage: dpo needs trl")
    goes_on(replace(config, stage="dpo", dataset=(str(pairs),), logging_steps=3, save_strategy="no"), 4)


def test_evaluations_without_a_lower_loss_are_counted_on(config):
    """In step 3 early stopping ends the run anyway."""
    goes_on(
        replace(
            config, val_size=4, eval_strategy="steps", eval_steps=1, save_steps=1, early_stopping_steps=2,
            learning_rate=0.5, max_steps=12,
        ),
        2, 3,
    )  # fmt: skip


def test_what_may_differ_where_a_run_goes_on_and_what_may_not(config, pairs):
    train(config)
    again = replace(config, resume_from_checkpoint=str(config.output / "checkpoint-3"))
    for change in (
        {"lora_rank": 8}, {"lora_alpha": 9.0}, {"lora_target": ("q_proj",)}, {"seed": 7},
        {"per_device_train_batch_size": 4}, {"gradient_accumulation_steps": 2}, {"cutoff_len": 28, "overlong": "drop"},
        {"packing": True}, {"train_on_prompt": True}, {"max_samples": 23}, {"stage": "dpo", "dataset": (str(pairs),)},
        {"adapters": (config,)}, {"max_steps": 2},
    ):  # fmt: skip
        with pytest.raises(TrainingError, match="checkpoint"):
            train(replace(again, **change))
    for change in ({"resume_from_checkpoint": "true"}, {"learning_rate": 0.0}):  # all steps are done; a rate of 0
        kept = checkpoints(config.output)[-1] if "learning_rate" not in change else config.output / "checkpoint-3"
        want = load_file(kept / "adapter_model.safetensors")
        train(replace(again, **change))
        assert [step for step, _ in enumerate(losses(config.output), 1)] == list(range(1, 7))
        held = load_file(config.output / "adapter_model.safetensors")
        name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
        assert held[name].equal(want[name])


def test_a_checkpoint_that_is_not_whole_is_named(config):
    train(replace(config, max_steps=3))
    folder = config.output / "checkpoint-3"
    assert "unlogged" in opened(folder)
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(TrainingError, match=path.name):
            opened(folder)
        path.unlink()
        with pytest.raises(TrainingError, match=path.name if path.name != "run.json" else "no checkpoint"):
            opened(folder)
        path.write_bytes(data)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A file that would be larger cannot be written, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (8_000, {}),  # the adapter of a checkpoint
        (200_000, {}),  # its optimiser
        (60_000, {"save_strategy": "no", "adapter_format": "kt-fused"}),
    ],
)
def test_a_full_disk_leaves_nothing_half_written(config, capsys, size, settings, together):
    config = replace(config, max_steps=1, **settings)
    if together:
        config = replace(config, adapters=(replace(config, adapter_name="a"), replace(config, adapter_name="b")))
    with largest_file(size), pytest.raises(UserError, match=r"the (checkpoint|adapter) cannot be written to .*out"):
        train(config)
    assert {path.name for path in config.output.rglob("*") if path.is_file()} == {"log.jsonl"}


def test_a_disk_that_is_full_later_leaves_whole_checkpoints(config, monkeypatch):
    real = Path.replace

    def full(path, target):
        if "checkpoint-6" in str(target):
            raise OSError(28, "No space left on device")
        return real(path, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(TrainingError, match=r"step 6: the checkpoint cannot be written.*No space left"):
        train(config)
    assert [path.name for path in checkpoints(config.output)] == ["checkpoint-3"]
    assert sorted(path.name for path in config.output.iterdir()) == ["checkpoint-3", "log.jsonl"]
