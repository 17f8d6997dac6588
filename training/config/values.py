"""A setting's written value as its field's type, within its limits. Torch-free."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from training.config.document import Value
from training.config.fields import TARGET_ALIASES, TrainConfig

FIELDS: Mapping[str, Field[Any]] = {f.name: f for f in fields(TrainConfig)}
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_HINTS = typing.get_type_hints(TrainConfig)
_WANTED = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}


def is_optional(name: str) -> bool:
    return isinstance(_HINTS[name], types.UnionType)


def converted_value(name: str, key: str, value: Value) -> Any:
    """The value as the field's type, within its limits."""
    hint, metadata = _HINTS[name], FIELDS[name].metadata
    if name == "adapters":
        if not isinstance(value.data, list) or not value.data:
            raise value.error("adapters is a list of mappings, at least one", name)
        return value.data
    optional = is_optional(name)
    if optional:
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        return _words(key, value, TARGET_ALIASES if name == "lora_target" else {})
    if value.data is None or (name == "max_steps" and value.data == "-1"):
        if optional:
            return None
        if FIELDS[name].default is MISSING or value.data is None:
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
        return True if word in TRUE else False if word in FALSE else None
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
