"""YAML and overrides become a TrainConfig. Torch-free."""

from __future__ import annotations

import difflib
import math
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import Any

from training.config.checks import EXCLUSIVE, check_adapters, check_run, check_written
from training.config.document import Settings, Value, parse_override, read_settings
from training.config.errors import ConfigError
from training.config.fields import KT_FIELDS, PATHS, PER_ADAPTER, TARGET_ALIASES, TrainConfig
from training.config.others import NO_OPS, REFUSED

_FIELDS: Mapping[str, Field[Any]] = {f.name: f for f in fields(TrainConfig)}
_ALIASES = {alias: name for name, f in _FIELDS.items() for alias in f.metadata["aliases"]}
_HINTS = typing.get_type_hints(TrainConfig)
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_WANTED = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}
_OWN_TEMPLATES = ("qwen", "qwen3", "qwen3_nothink", "default")  # LLaMA-Factory's, for models that bring theirs
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
    return _values(settings, tuple(_FIELDS))[0]


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
    rest = {key: value for key, value in settings.items() if key != "kt_config"}
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
    values, where = _values(settings, tuple(_FIELDS))
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
            if value.data is None or (isinstance(value.data, str) and value.data.lower() in (*_FALSE, "none", "")):
                continue  # what is refused is switched off
            raise value.error(f"{key} is refused: {REFUSED[key]}", key)
        if key in NO_OPS:
            _check_no_op(key, value)
            continue
        name = _field_of(key)
        if name not in _FIELDS:
            known = [*_FIELDS, *_ALIASES, *_INVERSE, *NO_OPS, "kt_config"]
            raise value.error(f"unknown key {key}{_near(key, known)}", key)
        if name not in allowed:
            raise value.error(f"{key} is the same for all adapters: write it at the top level", key)
        converted = _converted(name, key, value)
        if key in _INVERSE:
            converted = not converted
        if name in values and values[name] != converted:
            raise value.error(f"{key} contradicts {name} in {where[name]}", key)
        values[name], where[name] = converted, value.where
    return values, where


def _check_no_op(key: str, value: Value) -> None:
    row, text = NO_OPS[key], _text(value)
    if row.allowed and text.lower() not in row.allowed:
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
    if resume is not None and resume.lower() in (*_TRUE, *_FALSE):
        values["resume_from_checkpoint"] = "true" if resume.lower() in _TRUE else None
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
    _derive_schedule(values)
    for name in PATHS:
        if isinstance(values.get(name), str):
            values[name] = os.path.expanduser(values[name])


def _derive_schedule(values: dict[str, Any]) -> None:
    if values.get("max_steps") is not None:
        values["num_train_epochs"] = None
    elif values.get("num_train_epochs", 0) is not None and "num_train_epochs" in values:
        values["max_steps"] = None


def _converted(name: str, key: str, value: Value) -> Any:
    """The value as the field's type, within its limits."""
    hint, metadata = _HINTS[name], _FIELDS[name].metadata
    if name == "adapters":
        if not isinstance(value.data, list) or not value.data:
            raise value.error("adapters is a list of mappings, at least one", name)
        return value.data
    optional = isinstance(hint, types.UnionType)
    if optional:
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        return _words(key, value, TARGET_ALIASES if name == "lora_target" else {})
    if value.data is None or (name == "max_steps" and value.data == "-1"):
        if optional:
            return None
        if _FIELDS[name].default is MISSING or value.data is None:
            raise value.error(f"{key} has no value: {_WANTED[hint]} is expected", name)
    if not isinstance(value.data, str):
        raise value.error(f"{key}: {_WANTED[hint]} is expected, not a {type(value.data).__name__}", name)
    converted = _scalar(hint, value.data)
    if converted is None:
        raise value.error(f"{key} is {value.data!r}: {_WANTED[hint]} is expected", name)
    if metadata["choices"]:
        by_lower = {choice.lower(): choice for choice in metadata["choices"]}
        if converted.lower() not in by_lower:
            allowed = ", ".join(metadata["choices"])
            raise value.error(f"{key} is {value.data!r}: allowed is {allowed}", name)
        return by_lower[converted.lower()]
    if metadata["limits"]:
        least, most = metadata["limits"]
        if not least <= converted <= most:  # nan is outside
            raise value.error(f"{key} is {value.data}: allowed is {least:.10g} to {most:.10g}", name)
    return converted


def _scalar(kind: type, text: str) -> Any:
    """None if `text` is not one."""
    if kind is str:
        return text
    if kind is bool:
        word = text.lower()
        return True if word in _TRUE else False if word in _FALSE else None
    try:
        number = float(text)
        if kind is float:
            return number
        return int(number) if math.isfinite(number) and number == int(number) else None
    except ValueError:
        return None


def _words(key: str, value: Value, aliases: Mapping[str, str]) -> tuple[str, ...]:
    """A list, or words between commas."""
    items: list[str | None]
    if isinstance(value.data, list):
        items = [item.data if isinstance(item.data, str) else None for item in value.data]
    elif isinstance(value.data, str):
        items = [word.strip() for word in value.data.split(",")]
    else:
        items = [None] if value.data is not None else []
    if not all(items):
        raise value.error(f"{key}: a list of names is expected, or names between commas", key)
    words = tuple(aliases.get(item, item) for item in items if item)
    if len(set(words)) != len(words):
        raise value.error(f"{key} names one thing twice", key)
    return words


def _near(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {close[0]}?" if close else ""
