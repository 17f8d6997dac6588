"""YAML and overrides become a TrainConfig. Torch-free."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ktserve.settings import FALSE, TRUE
from training.config.checks import EXCLUSIVE, check_adapters, check_run, check_written
from training.config.document import Settings, Value, parse_override, read_settings
from training.config.fields import ATTENTION_TARGETS, KT_FIELDS, PATHS, PER_ADAPTER, TrainConfig
from training.config.others import NO_OPS, belongs
from training.config.refused import OFF, REFUSED
from training.config.values import SETTINGS, converted_value
from training.errors import ConfigError

_ALIASES = {alias: name for name, setting in SETTINGS.items() for alias in setting.aliases}
_OWN_TEMPLATES = (
    "qwen",
    "qwen2",
    "qwen2_5",
    "qwen3",
    "qwen3_nothink",
    "default",
)  # LLaMA-Factory's, for models that bring theirs
_CPU = ("use_cpu", "no_cuda")  # transformers' names for device: cpu
_WEIGHT_FORMATS = {"bf16": "AMXBF16", "int8": "AMXInt8"}
_INVERSE = {"disable_gradient_checkpointing": "gradient_checkpointing"}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The settings of a YAML file, `key=value` overrides over them (`adapters.0.key=value` for one adapter's).
    ConfigError, with file and line, for an unknown key, a value of another type or outside its limits, and settings
    that contradict one another. An override takes the place of what the file says, under any of its names, and of what
    may not be given together with it."""
    path = Path(os.path.expanduser(path))
    settings = _flat(read_settings(path))
    over: Settings = {}
    entries = []
    for names, value in map(parse_override, overrides):
        if names[0] == "adapters" and len(names) > 1:
            entries.append((names[1:], value))
        elif names[0] == "kt_config" and len(names) == 2:
            over[names[1]] = value
        elif len(names) == 1:
            over.update(_flat({names[0]: value}))
        else:
            raise value.error("key=value, kt_config.key=value or adapters.NUMBER.key=value is expected", "overrides")
    check_written(over)
    settings = _overridden(settings, over)
    for names, value in entries:
        settings = _override_entry(settings, names, value)
    check_written(settings)
    return _config(settings, str(path))


def read_values(given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Settings given as Python values, by name; None: not given. ConfigError, with `source`, as for a file's."""
    settings = {name: Value(str(value), f"{source}.{name}") for name, value in given.items() if value is not None}
    return _values(settings, tuple(SETTINGS))[0]


def _overridden(settings: Settings, over: Settings) -> Settings:
    dropped: set[str] = set()
    for key in over:
        name = _field_of(key)
        dropped |= {name, *(other for pair in EXCLUSIVE if name in pair for other in pair)}
    return {key: value for key, value in settings.items() if _field_of(key) not in dropped} | over


def _override_entry(settings: Settings, names: Sequence[str], value: Value) -> Settings:
    """`settings` with a value in its list of adapters."""
    listed = settings.get("adapters")
    entries = listed.data if listed is not None and isinstance(listed.data, list) else []
    index = int(names[0]) if names[0].isdecimal() else len(entries)
    if listed is None or len(names) != 2 or index >= len(entries):
        message = f"adapters.NUMBER.key=value is expected; there are {len(entries)} adapters, counted from 0"
        raise value.error(message, "adapters")
    old = entries[index]
    new = Value(_overridden(old.data if isinstance(old.data, dict) else {}, {names[1]: value}), old.where)
    return {**settings, "adapters": Value([*entries[:index], new, *entries[index + 1 :]], listed.where)}


def _field_of(key: str) -> str:
    return _ALIASES.get(key, _INVERSE.get(key, key))


def _flat(settings: Settings) -> Settings:
    """The nested spelling of KT's keys as the flat one. ConfigError where both are written and differ."""
    nested = settings.get("kt_config")
    rest = {key: value for key, value in settings.items() if key not in ("kt_config", *_CPU)}
    for key in _CPU:
        if key in settings and _text(settings[key]).lower() in TRUE:
            if "device" in rest and _text(rest["device"]) != "cpu":
                raise settings[key].error(f"{key} contradicts device in {rest['device'].where}", "device")
            rest["device"] = Value("cpu", settings[key].where)
    if nested is None or nested.data is None:
        return rest
    if not isinstance(nested.data, dict):
        raise nested.error("kt_config is a mapping of kt_... keys", "kt_config")
    for key, value in nested.data.items():
        key = "use_kt" if key == "enabled" else key
        if not key.startswith("kt_") and key != "use_kt":
            raise value.error(f"kt_config.{key}: unknown key{_near(key, KT_FIELDS)}", key)
        if key in rest and not _same(rest[key], value):
            message = f"{key} is {value.data} in kt_config, but {rest[key].data} in {rest[key].where}"
            raise value.error(f"{message}: write it once", key)
        rest.setdefault(key, value)
    return rest


def _same(first: Value, second: Value) -> bool:
    return str(first.data).lower() == str(second.data).lower()


def _config(settings: Settings, source: str) -> TrainConfig:
    values, where = _values(settings, tuple(SETTINGS))
    entries: list[Value] | None = values.pop("adapters", None)
    _derive(values, where)
    fixed_alpha = "lora_alpha" in values
    if not fixed_alpha and "lora_rank" in values:
        values["lora_alpha"] = 2.0 * values["lora_rank"]
    base = replace(TrainConfig(), **values)
    for name in ("model_name_or_path", "output_dir"):
        if not getattr(base, name):
            raise ConfigError(f"{source}: {name} is missing", name)
    if entries is None:
        check_run(base, where, source)
        return base
    base = replace(base, adapters=tuple(_adapter(entry, base, where, fixed_alpha) for entry in entries))
    check_adapters(base, settings["adapters"], where)
    return base


def _adapter(entry: Value, base: TrainConfig, base_where: Mapping[str, str], fixed_alpha: bool) -> TrainConfig:
    """One of several adapters: what its entry says, else what `base` says. `fixed_alpha`: lora_alpha was written."""
    if not isinstance(entry.data, dict):
        raise entry.error("an entry of adapters is a mapping: {name: ..., lora_rank: ...}", "adapters")
    if "name" not in entry.data and "adapter_name" not in entry.data:
        raise entry.error("an entry of adapters needs a name", "adapters")
    check_written(entry.data)
    own, where = _values(entry.data, PER_ADAPTER)
    if "lora_rank" in own and not fixed_alpha:
        own.setdefault("lora_alpha", 2.0 * own["lora_rank"])
    _derive_schedule(own)
    run = replace(base, **own)
    check_run(run, {**base_where, **where}, entry.where)
    return run


def _values(settings: Settings, allowed: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Converted values by field, and where each was written."""
    values: dict[str, Any] = {}
    where: dict[str, str] = {}
    for key, value in settings.items():
        if key in REFUSED:
            if value.data is None or (
                isinstance(value.data, str) and value.data.lower() in (*FALSE, "none", "", *OFF.get(key, ()))
            ):
                continue  # what is refused is switched off
            raise value.error(f"{key} is refused: {REFUSED[key]}", key)
        if key in NO_OPS:
            _check_no_op(key, value)
            continue
        name = _field_of(key)
        if name not in SETTINGS and belongs(key) is not None:
            continue
        if name not in SETTINGS:
            known = [*SETTINGS, *_ALIASES, *_INVERSE, *NO_OPS, "kt_config"]
            raise value.error(f"unknown key {key}{_near(key, known)}", key)
        if name not in allowed:
            raise value.error(f"{key} is the same for all adapters: write it at the top level", key)
        if value.data is None and not SETTINGS[name].optional:
            continue  # as if it were not written
        converted = converted_value(name, key, value)
        if key in _INVERSE:
            converted = not converted
        if name in values and values[name] != converted:
            raise value.error(f"{key} contradicts {name} in {where[name]}", key)
        values[name], where[name] = converted, value.where
    return values, where


def _check_no_op(key: str, value: Value) -> None:
    row, text = NO_OPS[key], _text(value)
    if value.data is not None and row.allowed and text.lower() not in row.allowed:
        raise value.error(f"{key}: {text} cannot be: {row.reason}; {row.instead}", key)


def _text(value: Value) -> str:
    """As one writes it; a list with one word as that word."""
    if isinstance(value.data, list):
        return ", ".join(map(_text, value.data))
    if isinstance(value.data, dict):
        return ", ".join(f"{key}: {_text(item)}" for key, item in value.data.items())
    return value.data or ""


def _derive(values: dict[str, Any], where: dict[str, str]) -> None:
    """Defaults that depend on other settings; names that stand for a setting."""
    resume = values.get("resume_from_checkpoint")
    if resume is not None and resume.lower() in (*TRUE, *FALSE):
        values["resume_from_checkpoint"] = "true" if resume.lower() in TRUE else None
    template = values.get("template")
    if template in _OWN_TEMPLATES:
        if template == "qwen3_nothink":
            if values.get("enable_thinking", False) not in (None, False):
                message = "template qwen3_nothink contradicts enable_thinking: true"
                raise ConfigError(f"{where['template']}: {message}", "template")
            values["enable_thinking"] = False
        values["template"] = "auto"
    elif template is not None and template != "auto" and not template.endswith((".jinja", ".jinja2", ".j2")):
        raise ConfigError(
            f"{where['template']}: template {template!r}: allowed is auto (the model's own), one of "
            f"{', '.join(_OWN_TEMPLATES)}, or a .jinja file",
            "template",
        )
    weights = values.get("kt_expert_weight_format", "auto")
    if weights in _WEIGHT_FORMATS:
        if values.get("kt_backend", "auto") not in ("auto", _WEIGHT_FORMATS[weights]):
            message = f"kt_expert_weight_format: {weights} contradicts kt_backend: {values['kt_backend']}"
            raise ConfigError(f"{where['kt_expert_weight_format']}: {message}", "kt_expert_weight_format")
        values["kt_backend"] = _WEIGHT_FORMATS[weights]
    if "lora_target" in values:
        values["lora_target"] = _targets(values["lora_target"])
    if (report := values.get("report_to")) is not None and "none" in report:
        if len(report) > 1:
            raise ConfigError(f"{where['report_to']}: report_to: none stands alone", "report_to")
        values["report_to"] = ()
    _derive_schedule(values)
    for name in PATHS:
        if isinstance(values.get(name), str):
            values[name] = os.path.expanduser(values[name])


def _targets(words: tuple[str, ...]) -> tuple[str, ...]:
    """Without the names that stand for several."""
    names = {"all-linear": ("all",), "all_linear": ("all",), "all_attention": ATTENTION_TARGETS}
    return tuple(dict.fromkeys(name for word in words for name in names.get(word, (word,))))


def _derive_schedule(values: dict[str, Any]) -> None:
    if values.get("max_steps") is not None:
        values["num_train_epochs"] = None
    elif values.get("num_train_epochs", 0) is not None and "num_train_epochs" in values:
        values["max_steps"] = None


def _near(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {close[0]}?" if close else ""
