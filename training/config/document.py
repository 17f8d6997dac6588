"""A YAML file of settings as values that know where they were written. Torch-free.

Scalars stay the text that was written: what they mean follows from the setting's type, not from YAML's guesses (`1e-4`
is a text to YAML 1.1, `no` and `off` are not).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ktserve.strict_yaml import MAX_BYTES, YamlError, compose
from training.errors import ConfigError

_MAX_DEPTH = 8  # adapters -> entry -> kt_config is four
_PLAIN = {
    f"tag:yaml.org,2002:{name}" for name in ("str", "bool", "int", "float", "null", "timestamp", "merge", "value")
}
_NULL = "tag:yaml.org,2002:null"


@dataclass(frozen=True)
class Value:
    """`data`: a scalar's text, None for null, a list, or a mapping. `where`: "FILE:LINE" or "override KEY=VALUE"."""

    data: str | list[Value] | dict[str, Value] | None
    where: str

    def error(self, message: str, field: str | None = None) -> ConfigError:
        return ConfigError(f"{self.where}: {message}", field)


Settings = dict[str, Value]


def read_settings(path: Path) -> Settings:
    """The file's mapping. ConfigError for anything else."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)  # a device has no end
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", "config") from None
    root = _read(data, str(path))
    if root is None or not isinstance(root.data, dict):
        raise ConfigError(f"{path}:1: 'name: value' lines are expected", "config")
    return root.data


def parse_override(override: str) -> tuple[list[str], Value]:
    """The names and the value of `key=value` or `outer.key=value`. The value is YAML."""
    name, equals, text = override.partition("=")
    where = f"override {override}"
    if not equals or not name:
        raise ConfigError(f"{where}: key=value is expected", "overrides")
    return name.split("."), Value(
        (_read(text.encode(errors="surrogateescape"), where, numbered=False) or Value(None, where)).data, where
    )


def _read(data: bytes, source: str, numbered: bool = True) -> Value | None:
    def at_line(line: int | None) -> str:
        return f"{source}:{line}" if numbered and line else source

    def where(mark: Any) -> str:
        return at_line(mark.line + 1 if mark else None)

    try:
        node = compose(data, max_depth=_MAX_DEPTH)
    except YamlError as error:
        raise ConfigError(f"{at_line(error.line)}: {error}", "config") from None

    def read(node: yaml.Node) -> Value:
        at = where(node.start_mark)
        if isinstance(node, yaml.ScalarNode):
            if node.tag not in _PLAIN:
                raise ConfigError(f"{at}: a value of type {node.tag} is not read here", "config")
            return Value(None if node.tag == _NULL else str(node.value), at)
        if isinstance(node, yaml.SequenceNode):
            return Value([read(item) for item in node.value], at)
        found: dict[str, Value] = {}
        for key, item in node.value:
            line = where(key.start_mark)
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{line}: a key must be a plain word", "config")
            if key.value in found:
                raise ConfigError(f"{line}: {key.value} is written twice, first in {found[key.value].where}", key.value)
            found[key.value] = Value(read(item).data, line)
        return Value(found, at)

    return None if node is None else read(node)
