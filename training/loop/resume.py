"""What a checkpoint has beyond transformers' files, so that a run goes on as it would have, or is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import EarlyStoppingCallback, TrainerState

from engine.errors import UserError
from training.config import TrainConfig
from training.data import Dataset

STATE = "trainer_state.json"  # transformers' file by which a checkpoint is known
NO_CHECKPOINT = "no checkpoint to resume from; name another folder, or train from the start"
_RECORD = "run.json"
# Settings that a checkpoint's matrices and its place in the data come from. The others may change: they take effect.
_FIXED = (
    "stage", "lora_rank", "lora_alpha", "lora_target", "per_device_train_batch_size", "gradient_accumulation_steps",
    "order_seed",
)  # fmt: skip
_OF_OPTIMISER = ("betas", "eps", "weight_decay", "initial_lr")


class TrainingError(UserError):
    """Training cannot go on. The message says at which step, why, and what to change."""


def identity(config: TrainConfig, rows: Dataset) -> dict[str, Any]:
    """What has to be equal where one run, of one adapter, goes on."""
    fixed = {name: getattr(config, name) for name in _FIXED}
    return {**fixed, "lora_target": list(config.lora_target), "data": rows.digest}


def check_identity(saved: Mapping[str, Any], wanted: Mapping[str, Any], checkpoint: Path) -> None:
    """TrainingError if a checkpoint is another run's."""
    names = [name for name, value in wanted.items() if saved.get(name) != value]
    for name in names:
        if name == "data":
            message = "is of other data: resume with the same data sets, cutoff_len, packing and template"
        else:
            said = "seed" if name == "order_seed" else name
            message = f"was written with {said} {saved.get(name)}, the configuration's is {wanted[name]}: give that"
        raise TrainingError(f"{checkpoint} {message}, or train from the start", "resume_from_checkpoint")


def seal(folder: Path, about: Mapping[str, Any]) -> None:
    """The last file of a checkpoint: `about`, and how large the others are."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    (folder / _RECORD).write_text(json.dumps({**about, "files": sizes}) + "\n")


def opened(checkpoint: Path) -> dict[str, Any]:
    """What `seal` was given. TrainingError for a folder that is no checkpoint, or lacks something of one."""
    try:
        record: dict[str, Any] = json.loads((checkpoint / _RECORD).read_text())
        sizes = record.pop("files")
    except FileNotFoundError:
        raise TrainingError(f"{checkpoint}: {NO_CHECKPOINT}", "resume_from_checkpoint") from None
    except (OSError, ValueError, KeyError) as error:
        message = f"{_RECORD} cannot be read ({error}): name another checkpoint"
        raise TrainingError(f"{checkpoint}: {message}", "resume_from_checkpoint") from None
    for name, size in sizes.items():
        path = checkpoint / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            message = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise TrainingError(f"{path} {message}: name another checkpoint", "resume_from_checkpoint")
    if not record.pop("resumes", True):
        message = "has no state of the optimiser (save_only_model): train from the start, or from adapter_name_or_path"
        raise TrainingError(f"{checkpoint} {message}", "resume_from_checkpoint")
    return record


@contextmanager
def written(output: Path, step: int) -> Iterator[None]:
    """Within, a checkpoint is written: TrainingError if that fails. torch says RuntimeError where a disk is full."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        reason = reason or f"is the disk full, or a file's size limited? ({str(error).splitlines()[0]})"
        raise TrainingError(
            f"step {step}: the checkpoint cannot be written to {output}: {reason}; earlier ones are whole", "output_dir"
        ) from error


@contextmanager
def as_configured(optimizer: torch.optim.Optimizer, schedule: Any) -> Iterator[None]:
    """Within, the states of both are loaded; learning rate and AdamW's settings stay those of the configuration."""
    groups = [{name: group[name] for name in _OF_OPTIMISER} for group in optimizer.param_groups]
    bases = list(schedule.base_lrs)
    yield
    schedule.base_lrs = bases
    rates = [base * factor(schedule.last_epoch) for base, factor in zip(bases, schedule.lr_lambdas, strict=True)]
    for group, settings, rate in zip(optimizer.param_groups, groups, rates, strict=True):
        group.update(settings, lr=rate)
    schedule._last_lr = rates


def check_left(state: TrainerState) -> None:
    """TrainingError if a checkpoint is of a later step than the last one that is asked for."""
    if state.global_step > state.max_steps:
        message = f"the checkpoint is of step {state.global_step}, and the run ends at step {state.max_steps}"
        raise TrainingError(f"{message}: raise max_steps or num_train_epochs", "max_steps")


class EarlyStop(EarlyStoppingCallback):  # type: ignore[misc]  # transformers has no types
    """Goes on counting the evaluations that a checkpoint has counted, and ends at once if those were enough."""

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        saved: Any = state.stateful_callbacks
        counted = saved.get(type(self).__name__, self.state())[
            "attributes"
        ]  # none where stopping is asked for only now
        self.early_stopping_patience_counter = counted["early_stopping_patience_counter"]
        control.should_training_stop |= self.early_stopping_patience_counter >= self.early_stopping_patience
