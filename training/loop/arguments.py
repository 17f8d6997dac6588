"""A run's settings as the arguments of transformers' and TRL's trainers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from transformers import TrainingArguments

from training.config import TrainConfig

Arguments = TypeVar("Arguments", bound=TrainingArguments)


def on_one_gpu(arguments: Arguments) -> Arguments:
    """A run computes on one GPU; transformers would copy the model to all that it finds."""
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def common_arguments(config: TrainConfig, device: str) -> dict[str, Any]:
    """What TrainingArguments and DPOConfig both take."""
    steps: dict[str, Any] = {"max_steps": config.max_steps} if config.max_steps else {}
    if not config.max_steps:
        steps["num_train_epochs"] = config.num_train_epochs
    if config.early_stopping_steps or config.load_best_model_at_end:
        steps |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}
    same = (
        "output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "weight_decay",
        "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "lr_scheduler_type", "seed", "data_seed",
        "logging_steps", "save_strategy", "save_steps", "save_total_limit", "eval_strategy", "eval_steps",
        "per_device_eval_batch_size", "logging_first_step", "eval_on_start", "eval_delay", "save_only_model",
        "run_name",
    )  # fmt: skip
    renamed = "activation_checkpointing" in {field.name for field in fields(TrainingArguments)}
    checkpointing = "activation_checkpointing" if renamed else "gradient_checkpointing"
    return {
        **{name: getattr(config, name) for name in same},
        **steps,
        checkpointing: config.gradient_checkpointing,
        f"{checkpointing}_kwargs": {"use_reentrant": False} if config.gradient_checkpointing else None,
        "warmup_steps": config.warmup_steps or config.warmup_ratio,  # a share if below 1
        "use_cpu": device == "cpu",
        "optim": "adamw_torch_fused",
        "report_to": list(config.report_to),
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "logging_nan_inf_filter": False,
        "label_names": ["labels"],
        "bf16": False,  # the model's own types are what is computed in; nothing is cast on the way
        "fp16": False,
    }
