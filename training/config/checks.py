"""Settings that contradict one another. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from training.config.document import Settings, Value
from training.config.fields import ATTENTION_TARGETS, EXPERT_TARGETS, REPORTERS, TrainConfig
from training.errors import ConfigError

# Of each pair one may be given, whatever its value; an override of one takes the place of the other.
EXCLUSIVE = (("max_steps", "num_train_epochs"), ("warmup_steps", "warmup_ratio"), ("val_size", "eval_dataset"))
_OFF = {"max_steps": ("-1",), "warmup_steps": ("0",), "warmup_ratio": ("0", "0.0"), "val_size": ("0", "0.0")}
# Settings that mean nothing unless another one has one of some values.
_NEEDS: tuple[tuple[str, str, tuple[object, ...]], ...] = (
    ("eval_steps", "eval_strategy", ("steps",)),
    ("save_steps", "save_strategy", ("steps",)),
    ("early_stopping_steps", "eval_strategy", ("steps", "epoch")),
    ("load_best_model_at_end", "eval_strategy", ("steps", "epoch")),
    ("eval_on_start", "eval_strategy", ("steps", "epoch")),
    ("eval_delay", "eval_strategy", ("steps", "epoch")),
    ("pref_beta", "stage", ("dpo",)),
    ("pref_loss", "stage", ("dpo",)),
    ("pref_ftx", "stage", ("dpo",)),
    ("dpo_label_smoothing", "stage", ("dpo",)),
    ("mask_history", "stage", ("sft",)),
    ("train_on_prompt", "stage", ("sft",)),
    ("dpo_label_smoothing", "pref_loss", ("sigmoid",)),
)
_DEFAULT = TrainConfig()
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_POLYNOMIAL_END = 1e-7  # the learning rate that transformers' schedule ends at
_CHECKPOINT = re.compile(r"checkpoint-[0-9]+")


def check_written(settings: Settings) -> None:
    """ConfigError if both of an exclusive pair are written, neither as "off"."""
    for pair in EXCLUSIVE:
        given = [name for name in pair if name in settings and not _is_off(name, settings[name])]
        if len(given) == 2:
            first, second = (settings[name] for name in given)
            raise second.error(f"{given[1]} contradicts {given[0]} in {first.where}: leave one of them out", given[1])


def _is_off(name: str, value: Value) -> bool:
    return value.data is None or value.data in _OFF.get(name, ())


def check_run(run: TrainConfig, where: Mapping[str, str], source: str) -> None:
    """ConfigError for values that do not go together. `where`: of the settings that were written."""

    def wrong(name: str, message: str, *others: str) -> ConfigError:
        place = next((where[each] for each in (name, *others) if each in where), source)
        return ConfigError(f"{place}: {message}", name)

    for name, other, allowed in _NEEDS:
        value = getattr(run, other)
        if name in where and value not in allowed and getattr(run, name) != getattr(_DEFAULT, name):
            wanted = " or ".join(map(str, allowed))
            raise wrong(name, f"{name} means something only with {other}: {wanted}; {other} is {value}")
    if not _NAME.fullmatch(run.adapter_name):
        message = "at most 100 letters, digits, '.', '_' and '-' are allowed, and a letter or a digit first"
        raise wrong("adapter_name", f"adapter name {run.adapter_name!r}: {message}")
    if not run.dataset and not run.adapters:
        raise wrong("dataset", "dataset is missing")
    unknown = [name for name in run.report_to if name not in REPORTERS]
    if unknown:
        raise wrong("report_to", f"report_to: {', '.join(unknown)}; allowed is none, or {', '.join(REPORTERS)}")
    if "all" in run.lora_target and len(run.lora_target) > 1:
        raise wrong("lora_target", "lora_target: all stands alone")
    _check_targets(run, wrong)
    _check_schedule(run, where, wrong)
    if run.device == "cpu" and run.stream_min_tokens:
        raise wrong(
            "stream_min_tokens", "stream_min_tokens contradicts device: cpu, to which nothing is streamed", "device"
        )
    if run.packing and run.stage == "dpo":
        raise wrong("packing", "packing contradicts stage: dpo, whose rows are pairs")
    if run.train_on_prompt and run.mask_history:
        raise wrong("mask_history", "mask_history contradicts train_on_prompt")
    if run.val_size > 1 and run.val_size != int(run.val_size):
        raise wrong("val_size", f"val_size is {run.val_size}: a share below 1, or a whole number of samples")
    if run.eval_strategy != "no" and not run.eval_dataset and not run.val_size:
        raise wrong("eval_strategy", f"eval_strategy: {run.eval_strategy} needs eval_dataset or val_size")
    if run.eval_strategy == "no" and (run.eval_dataset or run.val_size):
        name = "eval_dataset" if run.eval_dataset else "val_size"
        raise wrong(name, f"{name} is never used with eval_strategy: no; allowed is steps or epoch")


def _check_targets(run: TrainConfig, wrong: Callable[..., ConfigError]) -> None:
    targets, known = run.lora_target, (*ATTENTION_TARGETS, *EXPERT_TARGETS)
    unknown = [name for name in targets if name not in ("all", *known)]
    if unknown or not targets:
        said = ", ".join(unknown) or "nothing"
        raise wrong("lora_target", f"lora_target: {said}; allowed are all, or some of {', '.join(known)}")
    if run.lora_dropout and (targets == ("all",) or set(targets) & set(EXPERT_TARGETS)):
        raise wrong(
            "lora_dropout",
            f"lora_dropout is {run.lora_dropout:g}; LoRA on experts has no dropout: set it to 0, or lora_target to "
            f"attention's {','.join(ATTENTION_TARGETS)}",
        )


def _check_schedule(run: TrainConfig, where: Mapping[str, str], wrong: Callable[..., ConfigError]) -> None:
    warm = "warmup_steps" if run.warmup_steps else "warmup_ratio" if run.warmup_ratio else None
    if warm is not None and run.lr_scheduler_type == "constant":
        message = f"{warm} contradicts lr_scheduler_type: constant; constant_with_warmup has one"
        raise wrong(warm, message, "lr_scheduler_type")
    if run.lr_scheduler_type == "polynomial" and run.learning_rate <= _POLYNOMIAL_END:
        message = f"lr_scheduler_type: polynomial ends at {_POLYNOMIAL_END:g}; learning_rate is {run.learning_rate:g}"
        raise wrong("learning_rate", message, "lr_scheduler_type")
    best = "early_stopping_steps" if run.early_stopping_steps else "load_best_model_at_end"
    if not getattr(run, best):
        return
    if run.save_strategy != run.eval_strategy:
        raise wrong(
            best,
            f"{best} keeps the checkpoint with the lowest loss: save_strategy has to be eval_strategy's "
            f"{run.eval_strategy}, not {run.save_strategy}",
        )
    every = run.eval_steps or run.logging_steps
    if run.eval_strategy == "steps" and run.save_steps % every:
        message = f"with {best} save_steps is a multiple of eval_steps, {every}; it is {run.save_steps}"
        raise wrong("save_steps", message, "eval_steps", best)


# Settings of a run that adapters in one batch do not have, and the value of each that means so: its default.
ALONE: Mapping[str, object] = {
    "stage": "sft",
    "lora_dropout": 0.0,
    "eval_strategy": "no",
    "eval_dataset": (),
    "val_size": 0.0,
    "early_stopping_steps": None,
    "adapter_name_or_path": None,
    "load_best_model_at_end": False,
    "save_only_model": False,
    "report_to": (),
}


def check_adapters(config: TrainConfig, value: Value, where: Mapping[str, str]) -> None:
    """ConfigError unless the entries can be trained together. `where`: of the settings at the top level."""
    names = [run.adapter_name for run in config.adapters]
    for name in names:
        if names.count(name) > 1:
            raise value.error(f"two adapters are named {name}", "adapters")
        if _CHECKPOINT.fullmatch(name):
            raise value.error(f"an adapter named {name} would lie in output_dir where a checkpoint does", "adapters")
    if "adapter_name" in where:
        message = "adapter_name means nothing beside adapters, each of which has a name"
        raise ConfigError(f"{where['adapter_name']}: {message}: leave it out", "adapter_name")
    for run in (config, *config.adapters):
        for name, allowed in ALONE.items():
            if (given := getattr(run, name)) != allowed:
                raise ConfigError(
                    f"{where.get(name, value.where)}: {name}: {given} contradicts adapters, which are trained in one "
                    "batch: leave it out, or train one adapter alone",
                    name,
                )
    if config.save_strategy == "epoch":
        message = "save_strategy: epoch contradicts adapters, whose epochs differ; allowed is steps or no"
        raise ConfigError(f"{where.get('save_strategy', value.where)}: {message}", "save_strategy")
