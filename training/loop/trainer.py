"""What `ktserve train` adds to transformers' Trainer, and so to TRL's trainers: checkpoints that are whole or not
there, a stop at the first loss that is no number, and a count of tokens."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import TrainerState

from training.data import ShuffledSampler
from training.loop.clipping import clip
from training.loop.meter import Meter
from training.loop.optimizer import SkippingAdamW, expert_loras
from training.loop.resume import STATE, TrainingError, as_configured, check_left, seal, written

_STAGE = ".partial"
PAD = 0  # a token id that stands in padding; whatever it is, nothing reads it


class Run(Trainer):  # type: ignore[misc]  # transformers has no types
    """Fine-tuning: cross entropy on the labels, averaged over all tokens of a step. A base of other trainers too.
    `about`: what its checkpoints say of it (`resume.identity`)."""

    meter: Meter | None = None
    skips_idle_experts = False
    about: Mapping[str, Any] = {}

    def go_on(self, unlogged: Mapping[str, Any]) -> None:
        """Training is to begin with what a checkpoint's run had not logged yet."""
        self.add_callback(_GoesOn(self, unlogged))

    def unlogged(self) -> dict[str, Any]:
        """Of the steps since the last record of the log."""
        return {"loss": self._tr_loss.item(), "since": self._globalstep_last_logged}

    def restore(self, unlogged: Mapping[str, Any]) -> None:
        check_left(self.state)
        self._tr_loss.fill_(unlogged["loss"])
        self._globalstep_last_logged = unlogged["since"]

    def _get_train_sampler(self, train_dataset: Any = None) -> ShuffledSampler:
        rows = self.train_dataset if train_dataset is None else train_dataset
        return ShuffledSampler(len(rows), self.args.seed if self.args.data_seed is None else self.args.data_seed)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.skips_idle_experts and not isinstance(optimizer, SkippingAdamW):
            optimizer = self.optimizer = SkippingAdamW(optimizer.param_groups, expert_loras(self.model))
        return optimizer

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        samples = _lengths(inputs)
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        state: TrainerState = self.state
        check_loss(loss.item(), f"step {state.global_step + 1}")
        state.num_input_tokens_seen += sum(samples)
        if self.meter is not None:
            self.meter.count(samples)
        return loss

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """A run that is resumed behind its last step only writes its result; transformers would take one more step."""
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        return clip(model.parameters(), self.args.max_grad_norm)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes a folder beside its place and renames it when it is whole and on disk."""
        output = Path(self.args.output_dir)
        name = f"checkpoint-{self.state.global_step}"
        stage = output / _STAGE
        shutil.rmtree(stage, ignore_errors=True)
        self.args.output_dir = str(stage)
        try:
            with written(output, self.state.global_step):
                super()._save_checkpoint(model, trial)
                self._name_best(output)
                self.state.save_to_json(str(stage / name / STATE))
                about = {"run": dict(self.about), "unlogged": self.unlogged(), "resumes": not self.args.save_only_model}
                seal(stage / name, about)
                sync_tree(stage)
                remove_folder(output / name)
                (stage / name).replace(output / name)
                sync_tree(output, deep=False)
        finally:
            self.args.output_dir = str(output)
            shutil.rmtree(stage, ignore_errors=True)
        self._drop_old(output)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """The adapter's float32 master parameters under PEFT's names, and nothing else."""
        self.model.save_pretrained(output_dir or self.args.output_dir, save_embedding_layers=False)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with as_configured(self.optimizer, self.lr_scheduler):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _name_best(self, output: Path) -> None:
        """The best checkpoint by its final place; only a checkpoint that exists, or this one, can be it."""
        best = self.state.best_global_step
        if best and (best == self.state.global_step or (output / f"checkpoint-{best}").is_dir()):
            self.state.best_model_checkpoint = str(output / f"checkpoint-{best}")

    def _drop_old(self, output: Path) -> None:
        kept = self.args.save_total_limit
        if not kept:
            return
        found = checkpoints(output)
        best = self.state.best_model_checkpoint
        for folder in found[:-kept]:
            if str(folder) != best:
                remove_folder(folder)


class _GoesOn(TrainerCallback):  # type: ignore[misc]
    """transformers begins with sums of zero; this comes behind."""

    def __init__(self, run: Run, unlogged: Mapping[str, Any]) -> None:
        self._run, self._unlogged = run, unlogged

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._run.restore(self._unlogged)


def check_loss(loss: float, step: str) -> None:
    """TrainingError if it is no number."""
    if not math.isfinite(loss):
        raise TrainingError(
            f"{step}: the loss is {loss}. The last checkpoint is good: lower learning_rate or raise warmup_steps, and "
            "look for broken rows in the data",
            "learning_rate",
        )


def checkpoints(output: Path) -> list[Path]:
    """The checkpoint folders, oldest first."""
    named = [path for path in output.glob("checkpoint-*") if path.name.partition("-")[2].isdecimal()]
    return sorted(named, key=lambda path: int(path.name.partition("-")[2]))


def remove_folder(folder: Path) -> None:
    """First from its name, so that nothing half removed has it."""
    if folder.exists():
        gone = folder.with_name(f".{folder.name}.removed")
        shutil.rmtree(gone, ignore_errors=True)
        folder.replace(gone)
        shutil.rmtree(gone, ignore_errors=True)


def remove_leftovers(output: Path) -> None:
    """What a run that was killed had begun to write or to remove."""
    for path in (output / _STAGE, *output.glob(".checkpoint-*.removed")):
        shutil.rmtree(path, ignore_errors=True)


def sync_tree(folder: Path, deep: bool = True) -> None:
    """The folder's entries, and with `deep` what they hold, are on disk when this returns."""
    for path in (folder, *(folder.rglob("*") if deep else ())):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _lengths(inputs: Any) -> list[int]:
    """Tokens of each sample, without padding."""
    if "segments" in inputs:
        rows = [row[row >= 0] for row in inputs["segments"]]
        return [count for row in rows for count in row.unique(return_counts=True)[1].tolist()]
    if "attention_mask" in inputs:
        return list(inputs["attention_mask"].sum(1).tolist())
    return [inputs["input_ids"].shape[1]] * len(inputs["input_ids"])
