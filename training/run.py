"""One training run, from its settings to the adapter's files."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from transformers import EarlyStoppingCallback, PreTrainedModel, PrinterCallback, Trainer, TrainingArguments, set_seed

from engine.errors import UserError
from training.arguments import common_arguments
from training.config import TrainConfig
from training.data import Dataset, PackedDataset, build_datasets, load_tokenizer
from training.data.collate import PackingCollator, PaddingCollator
from training.kernels import expert_maker
from training.layer import lora_config
from training.memory.plan import plan_training
from training.model import load_model
from training.progress import Progress, StopOnSignal, draw_curve
from training.save import save_adapter
from training.trainer import PAD, Run, TrainingError, checkpoints, remove_folder


@dataclass(frozen=True)
class Outcome:
    """`folders`: the adapters that were written, by name; none if the run was stopped before its end."""

    folders: dict[str, Path]
    stopped: bool
    loss: float


def train(config: TrainConfig, *, stop: StopOnSignal | None = None) -> Outcome:
    """Trains what `config` describes and writes the adapter into its `output_dir`. UserError (TrainingError) says what
    to change; checkpoints written before are whole."""
    output = config.output
    if config.adapters:
        raise UserError("adapters: several in one batch cannot be trained yet: train them one by one", "adapters")
    checkpoint = _begin(config, output)
    plan_training(config).check(config.force_memory_plan)
    rows, held = build_datasets(config, load_tokenizer(config))
    set_seed(config.seed)
    trainer = _trainer(config, load_base(config), rows, held)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Progress(output))
    stop = stop or StopOnSignal()
    trainer.add_callback(stop)
    if config.early_stopping_steps:
        trainer.add_callback(EarlyStoppingCallback(config.early_stopping_steps))
    for note in _notes(trainer.model, rows):
        print(note, flush=True)
    if checkpoint is None:
        for old in checkpoints(output):  # of a run that this one overwrites, and no one shall resume
            remove_folder(old)
    try:
        result = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    except OSError as error:
        raise TrainingError(f"{output}: {error.strerror or error}", "output_dir") from error
    if stop.stopped:
        last = checkpoints(output)[-1]
        print(f"stopped at {last}; --resume goes on from there", flush=True)
        return Outcome({}, True, result.training_loss)
    base, form = config.model_name_or_path, config.adapter_format
    save_adapter(trainer.model, output, form, base=base, experts=expert_type(config))
    print(f"adapter written: {output}", flush=True)
    if config.plot_loss:
        try:
            draw_curve(output)
        except OSError as error:
            raise TrainingError(f"{output}: loss.png: {error.strerror or error}", "output_dir") from error
    return Outcome({config.adapter_name: output}, False, result.training_loss)


def load_base(config: TrainConfig) -> PreTrainedModel:
    """The frozen model that `config` names, where and in the types that it says."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device: cuda, but torch finds no GPU here; allowed is cpu", "device")
    return load_model(
        config.model_name_or_path,
        expert_maker(config, lambda line: print(line, flush=True)),
        dtype=_dtype(config),
        attention="eager" if config.flash_attn == "disabled" else "sdpa",
        device=device,
        experts_from=config.kt_weight_path,
    )


def expert_type(config: TrainConfig) -> torch.dtype | None:
    """What the experts' LoRA is rounded to in the adapter's files: bfloat16 where the run computes in it."""
    return torch.bfloat16 if config.bf16 else None


def _begin(config: TrainConfig, output: Path) -> Path | None:
    """Makes the output folder; the checkpoint to go on from, if one is asked for."""
    resume = config.resume_from_checkpoint
    try:
        output.mkdir(parents=True, exist_ok=True)
        held = sorted(name for name in os.listdir(output) if not name.startswith("."))
    except OSError as error:
        raise UserError(f"output_dir {output}: {error.strerror}", "output_dir") from error
    if resume:
        found = checkpoints(output)
        if resume != "true":
            found = [Path(resume)]
        if not found or not (found[-1] / "trainer_state.json").is_file():
            raise UserError(f"{found[-1] if found else output}: no checkpoint to go on from", "resume_from_checkpoint")
        return found[-1]
    if held and not config.overwrite_output_dir:
        raise UserError(
            f"output_dir {output} holds {', '.join(held[:3])}: give another, --resume, or overwrite_output_dir=true",
            "output_dir",
        )
    return None


def _trainer(config: TrainConfig, base: PreTrainedModel, rows: Dataset, held: Dataset | None) -> Trainer:
    device = base.device.type
    data: dict[str, Any] = {"train_dataset": rows, "eval_dataset": held}
    lora = lora_config(
        base, config.lora_target, rank=config.lora_rank, alpha=config.lora_alpha, dropout=config.lora_dropout
    )
    if config.stage == "dpo":
        if importlib.util.find_spec("trl") is None:
            raise UserError("stage: dpo needs the package trl (Python 3.11 or later): pip install trl", "stage")
        from training.dpo import make_trainer

        return make_trainer(config, base, lora, device, data)
    attention = "eager" if config.flash_attn == "disabled" else "sdpa"
    collator = (
        PackingCollator(PAD, attention, _dtype(config)) if isinstance(rows, PackedDataset) else PaddingCollator(PAD)
    )
    arguments = TrainingArguments(**common_arguments(config, device))
    return Run(get_peft_model(base, lora), arguments, data_collator=collator, **data)


def _dtype(config: TrainConfig) -> torch.dtype:
    return torch.bfloat16 if config.bf16 else torch.float32


def _notes(model: PeftModel, rows: Dataset) -> Sequence[str]:
    trained, everything = model.get_nb_trainable_parameters()
    return [
        f"data: {rows.report}",
        f"{trained:,} parameters are trained; the base beside the experts has {everything - trained:,}",
    ]
