"""YAML from people: one document of bounded size and depth, without anchors; every error has its line."""

from __future__ import annotations

from typing import Any

import yaml

MAX_BYTES = 1 << 20
MAX_DEPTH = 16  # PyYAML takes quadratic time on nesting without end


class YamlError(ValueError):
    """`line` counts from 1; None where the whole file is meant."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def compose(
    data: bytes, *, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH, loader: type[yaml.SafeLoader] | None = None
) -> yaml.Node | None:
    """The document's node, None for an empty one. `loader` decides how scalars without quotes are typed."""
    loader = loader or yaml.SafeLoader
    if len(data) > max_bytes:
        raise YamlError(f"{len(data)} bytes; at most {max_bytes} are allowed")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise YamlError(f"not UTF-8: {error.reason} at byte {error.start}", line) from None
    try:
        depth = 0
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > max_depth:
                raise YamlError(f"nested too deeply: at most {max_depth} levels are allowed", _line(event.start_mark))
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
                message = "anchors and aliases are not read here: write the value out"
                raise YamlError(message, _line(event.start_mark))
        return yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(f"not YAML: {error.problem or error.context}", _line(mark)) from None
    except yaml.YAMLError as error:
        raise YamlError(f"not YAML: {' '.join(str(error).split())}") from None


def load(data: bytes, *, loader: type[yaml.SafeLoader] | None = None) -> Any:
    """The document as Python's objects. A name that is written twice is an error, not the last one's value."""
    node = compose(data, loader=loader)
    if node is None:
        return None
    _check_names(node)
    try:
        return (loader or yaml.SafeLoader)("").construct_document(node)
    except yaml.MarkedYAMLError as error:
        raise YamlError(f"not read here: {error.problem}", _line(error.problem_mark)) from None
    except (ValueError, OverflowError) as error:
        raise YamlError(f"not read here: {error}") from None


def _check_names(node: yaml.Node) -> None:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_names(item)
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise YamlError("a key must be a plain word", line)
            if key.value in lines:
                raise YamlError(f"{key.value} is written twice, first in line {lines[key.value]}", line)
            lines[key.value] = line
            _check_names(value)


def _line(mark: Any) -> int | None:
    return None if mark is None else int(mark.line) + 1
