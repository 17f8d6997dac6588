"""A setting's written value as its field's type, within its limits. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktserve.settings import Setting, settings_of
from training.config.document import Value
from training.config.fields import TARGET_ALIASES, TrainConfig

SETTINGS: Mapping[str, Setting] = {setting.name: setting for setting in settings_of(TrainConfig)}


def converted_value(name: str, key: str, value: Value) -> Any:
    """The value as the field's type, within its limits."""
    setting = SETTINGS[name]
    if name == "adapters":
        if not isinstance(value.data, list) or not value.data:
            raise value.error("adapters is a list of mappings, at least one", name)
        return value.data
    if setting.many:
        return _words(key, value, TARGET_ALIASES if name == "lora_target" else {})
    if value.data is None or (name == "max_steps" and value.data == "-1"):
        if setting.optional:
            return None
        if value.data is None:
            raise value.error(f"{key} has no value: {setting.wanted} is expected", name)
    if not isinstance(value.data, str):
        raise value.error(f"{key}: {setting.wanted} is expected, not a {type(value.data).__name__}", name)
    _check_text(key, value.data, value)
    converted = setting.one(value.data)
    if converted is None:
        raise value.error(f"{key} is {value.data!r}: {setting.wanted} is expected", name)
    if allowed := setting.allowed(converted):
        written = repr(value.data) if setting.choices else value.data
        raise value.error(f"{key} is {written}: allowed is {allowed}", name)
    return converted


def _check_text(key: str, text: str, value: Value) -> None:
    """YAML can write characters that no file's name has."""
    wrong = next((char for char in text if char == "\0" or "\ud800" <= char <= "\udfff"), None)
    if wrong is not None:
        raise value.error(f"{key}: the character {wrong!r} is not allowed", key)


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
    for item in items:
        _check_text(key, item or "", value)
    words = tuple(aliases.get(item, item) for item in items if item)
    if len(set(words)) != len(words):
        raise value.error(f"{key} names one thing twice", key)
    return words
