"""One training run, from its settings to the adapter's files."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PrinterCallback, TrainingArguments, set_seed

from engine.errors import UserError
from engine.weights.open import open_model
from training.config import TrainConfig
from training.data import Dataset, PackedDataset, build_datasets, load_tokenizer
from training.data.collate import PackingCollator, PaddingCollator
from training.kernels import expert_maker
from training.layer import lora_config, with_lora
from training.loop.arguments import common_arguments, on_one_gpu
from training.loop.load import load_adapter, started
from training.loop.meter import Meter, make_meter
from training.loop.output import output_folder
from training.loop.progress import Progress, StopOnSignal, draw_curve, last_loss
from training.loop.resume import NO_CHECKPOINT, STATE, EarlyStop, TrainingError, check_identity, identity, opened
from training.loop.save import save_adapter
from training.loop.trainer import PAD, Run, checkpoints, remove_folder, remove_leftovers
from training.memory.plan import plan_training
from training.model import load_model, routed_experts
from training.multi_lora.group import Group


@dataclass(frozen=True)
class Outcome:
    """`folders`: the adapters that were written, by name; none if the run was stopped before its end."""

    folders: dict[str, Path]
    stopped: bool
    loss: float


def train(config: TrainConfig, *, stop: StopOnSignal | None = None) -> Outcome:
    """Trains what `config` describes and writes the adapter into its `output_dir`. UserError (TrainingError) says what
    to change; checkpoints written before are whole."""
    with output_folder(config.output):
        return _train(config, stop or StopOnSignal())


def _train(config: TrainConfig, stop: StopOnSignal) -> Outcome:
    output = config.output
    checkpoint = _begin(config, output)
    record = {} if checkpoint is None else opened(checkpoint)
    config, begun = started(config)
    plan_training(config).check(config.force_memory_plan)
    if config.adapters:
        return _train_multi_lora(config, checkpoint, stop)
    rows, held = build_datasets(config, load_tokenizer(config))
    about = identity(config, rows)
    _check_reporters(config)
    if checkpoint is not None:
        if "run" not in record:
            message = "is a checkpoint of several adapters: resume with the `adapters` that it is of"
            raise TrainingError(f"{checkpoint} {message}", "resume_from_checkpoint")
        check_identity(record["run"], about, checkpoint)
    set_seed(config.seed)
    trainer = _trainer(config, load_base(config), rows, held)
    trainer.remove_callback(PrinterCallback)
    trainer.about, trainer.meter = about, _meter(config, trainer.model)
    trainer.skips_idle_experts = config.idle_experts == "skip"
    if begun is not None:
        load_adapter(trainer.model, begun)
        print(f"goes on with {begun.path}: rank {config.lora_rank}, alpha {config.lora_alpha:g}", flush=True)
    if checkpoint is not None:
        trainer.go_on(record["unlogged"])  # before the log is cut to the checkpoint's steps
    vocabulary = trainer.model.config.vocab_size if config.stage == "sft" else None
    trainer.add_callback(Progress(output, trainer.meter, vocabulary=vocabulary))
    trainer.add_callback(stop)
    if config.early_stopping_steps:
        trainer.add_callback(EarlyStop(config.early_stopping_steps))
    for note in _notes(trainer.model, rows):
        print(note, flush=True)
    remove_leftovers(output)
    if checkpoint is None:
        _forget(output)
    try:
        result = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    except OSError as error:
        raise TrainingError(f"{output}: {error.strerror or error}", "output_dir") from error
    if stop.stopped:
        return _stopped(output, result.training_loss)
    _write(config, trainer.model, output)
    return Outcome({config.adapter_name: output}, False, result.training_loss)


def _train_multi_lora(config: TrainConfig, checkpoint: Path | None, stop: StopOnSignal) -> Outcome:
    """The adapters of `config.adapters` in one batch; each into output_dir/NAME. The outcome's loss is their mean."""
    tokenizer = load_tokenizer(config)
    data = [build_datasets(run, tokenizer)[0] for run in config.adapters]
    base = load_base(config)
    group = Group(config, base, data, _meter(config, base))
    for member in group.members:
        trained = sum(parameter.numel() for parameter in member.parameters.values())
        print(f"{member.config.adapter_name}: {member.rows.report}; {trained:,} parameters are trained", flush=True)
    remove_leftovers(config.output)
    if checkpoint is None:
        _forget(config.output)
    else:
        group.load(checkpoint)
    try:
        group.train(stop)
    except OSError as error:
        raise TrainingError(f"{config.output}: {error.strerror or error}", "output_dir") from error
    loss = sum(member.total / max(member.state.global_step, 1) for member in group.members) / len(group.members)
    if stop.stopped:
        return _stopped(config.output, loss)
    for member in group.members:
        _write(member.config, group.model, member.output, member.key)
    return Outcome({member.config.adapter_name: member.output for member in group.members}, False, loss)


def _meter(config: TrainConfig, model: nn.Module) -> Meter:
    sizes, device = open_model(config.model_name_or_path).config, next(model.parameters()).device
    streamed = next((e.lora_device for e in routed_experts(model) if e.lora_device.type != "cpu"), None)
    return make_meter(sizes, config, experts_only=device.type != "cpu" and streamed is None, gpu=streamed)


def _forget(output: Path) -> None:
    """Checkpoints of a run that this one overwrites, and no one shall resume."""
    for old in checkpoints(output):
        remove_folder(old)


def _stopped(output: Path, loss: float) -> Outcome:
    print(f"stopped at {checkpoints(output)[-1]}; --resume goes on from there", flush=True)
    return Outcome({}, True, loss)


def _write(config: TrainConfig, model: PeftModel, folder: Path, adapter: str = "default") -> None:
    """The adapter's files and its curve. `adapter`: its name within the model."""
    base, form = config.model_name_or_path, config.adapter_format
    save_adapter(model, folder, form, adapter=adapter, base=base, experts=expert_type(config))
    loss = last_loss(folder)
    print(f"adapter written: {folder}{'' if loss is None else f'; last loss {loss:.4g}'}", flush=True)
    if config.plot_loss:
        try:
            draw_curve(folder)
        except OSError as error:
            raise TrainingError(f"{folder}: loss.svg: {error.strerror or error}", "output_dir") from error


def load_base(config: TrainConfig) -> PreTrainedModel:
    """The frozen model that `config` names, where and in the types that it says."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device: cuda, but torch finds no GPU here; allowed is cpu", "device")
    return load_model(
        config.model_name_or_path,
        expert_maker(config, lambda line: print(line, flush=True), device),
        dtype=_dtype(config),
        attention="eager" if config.flash_attn == "disabled" else "sdpa",
        device=device,
        experts_from=config.kt_weight_path,
    )


def expert_type(config: TrainConfig) -> torch.dtype | None:
    """What the experts' LoRA is rounded to in the adapter's files: bfloat16 where the run computes in it."""
    return torch.bfloat16 if config.bf16 else None


def _begin(config: TrainConfig, output: Path) -> Path | None:
    """The checkpoint to resume from, if one is asked for."""
    resume = config.resume_from_checkpoint
    held = sorted(name for name in os.listdir(output) if not name.startswith("."))
    if resume:
        found = checkpoints(output)
        if resume != "true":
            found = [Path(resume)]
        if not found or not (found[-1] / STATE).is_file():
            raise UserError(f"{found[-1] if found else output}: {NO_CHECKPOINT}", "resume_from_checkpoint")
        return found[-1]
    if held and not config.overwrite_output_dir:
        raise UserError(
            f"output_dir {output} holds {', '.join(held[:3])}: give another, --resume, or overwrite_output_dir=true",
            "output_dir",
        )
    return None


def _check_reporters(config: TrainConfig) -> None:
    """UserError for a package that `report_to` needs."""
    for name in config.report_to:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"report_to: {name} needs the package {name}: pip install {name}", "report_to")


def _trainer(config: TrainConfig, base: PreTrainedModel, rows: Dataset, held: Dataset | None) -> Run:
    device = base.device.type
    data: dict[str, Any] = {"train_dataset": rows, "eval_dataset": held}
    lora = lora_config(
        base, config.lora_target, rank=config.lora_rank, alpha=config.lora_alpha, dropout=config.lora_dropout
    )
    if config.stage == "dpo":
        if importlib.util.find_spec("trl") is None:
            raise UserError("stage: dpo needs the package trl (Python 3.11 or later): pip install trl", "stage")
        from training.loop.dpo import make_trainer

        return make_trainer(config, base, lora, device, data)
    attention = "eager" if config.flash_attn == "disabled" else "sdpa"
    collator = (
        PackingCollator(PAD, attention, _dtype(config)) if isinstance(rows, PackedDataset) else PaddingCollator(PAD)
    )
    arguments = on_one_gpu(TrainingArguments(**common_arguments(config, device)))
    return Run(with_lora(base, lora), arguments, data_collator=collator, **data)


def _dtype(config: TrainConfig) -> torch.dtype:
    return torch.bfloat16 if config.bf16 else torch.float32


def _notes(model: PeftModel, rows: Dataset) -> Sequence[str]:
    trained, everything = model.get_nb_trainable_parameters()
    return [
        f"data: {rows.report}",
        f"{trained:,} parameters are trained; the base beside the experts has {everything - trained:,}",
    ]
