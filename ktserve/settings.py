"""A setting is declared once, as a field of a dataclass: name, type, range, help, other names.

The server's flags, KTSERVE_* variables and YAML keys are made of such fields, and so are the YAML keys of a training
run and their page. Values come as texts or as what YAML makes of them.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass
from typing import Any

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_WANTED = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}


def option(
    default: Any,
    help: str,
    group: str,
    *,
    choices: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    many: bool = False,
    limits: tuple[float, float] | None = None,
    default_help: str = "",
    per_adapter: bool = False,
) -> Any:
    """A field that is a setting: its flag is the field's name with dashes. `aliases` are other programs' names for it,
    `limits` the least and the most that a number may be. `many`: a list, whose flag may be repeated. `default_help`:
    what a default of None means. `per_adapter`: each of several adapters may have its own."""
    metadata = {
        "help": help, "group": group, "choices": choices, "aliases": aliases, "limits": limits,
        "default_help": default_help, "per_adapter": per_adapter,
    }  # fmt: skip
    if many:
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Setting:
    """One field of a settings dataclass. `kind`: str, int, float or bool, of each element if `many`; another class
    where its owner reads the value itself."""

    owner: type
    name: str
    kind: type
    optional: bool
    many: bool
    default: Any
    help: str
    group: str
    choices: tuple[str, ...]
    aliases: tuple[str, ...]
    limits: tuple[float, float] | None
    default_help: str
    per_adapter: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def meaning(self) -> str:
        """The help without what it says about the default."""
        return self.help.partition("; default")[0]

    @property
    def wanted(self) -> str:
        return _WANTED[self.kind]

    @property
    def range(self) -> str:
        return " to ".join(str(n) if isinstance(n, int) else f"{n:.10g}" for n in self.limits or ())

    def one(self, value: Any) -> Any:
        """A value as its type, a choice as it is spelt here; None if it is of another type."""
        converted = _converted(self.kind, value)
        if isinstance(converted, str) and converted not in self.choices:  # KTransformers writes AMXINT8, and AMXInt8
            return next((choice for choice in self.choices if choice.lower() == converted.lower()), converted)
        return converted

    def allowed(self, value: Any) -> str:
        """What it would allow instead of a value of its type; "" if it allows that."""
        if self.choices and value not in self.choices:
            return ", ".join(self.choices)
        return "" if self.limits is None or self.limits[0] <= value <= self.limits[1] else self.range  # nan is outside


def settings_of(owner: type) -> list[Setting]:
    """All settings of a dataclass whose fields are made by `option`."""
    hints = typing.get_type_hints(owner)
    found = []
    for field in dataclasses.fields(owner):
        hint, optional = hints[field.name], False
        if isinstance(hint, types.UnionType):
            (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
            optional = True
        if many := typing.get_origin(hint) in (list, tuple):
            hint = typing.get_args(hint)[0]
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        found.append(Setting(owner, field.name, hint, optional, many, default, **field.metadata))
    return found


def _converted(kind: type, value: Any) -> Any:
    if kind is bool:
        if isinstance(value, bool):
            return value
        word = str(value).lower()
        return True if word in TRUE else False if word in FALSE else None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if kind is str:
        return str(value)
    try:
        if kind is int and str(value).lstrip("+-").isdecimal():
            return int(value)  # exact, however large
        number = float(value)
    except (ValueError, OverflowError):
        return None
    if kind is float:
        return number
    return int(number) if math.isfinite(number) and number == int(number) else None
