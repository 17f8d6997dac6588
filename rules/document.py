"""A rules file as YAML: a list of {match, replace, recursive}, read strictly and with line numbers.

The schema is KTransformers' (a list of rules, `match: {name, class}`, `replace: {class, kwargs}`). Anything else is
a RulesError that names file, line, rule and key: duplicate keys, other keys, wrong types, anchors, several documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from ktserve.strict_yaml import YamlError, compose
from rules.errors import RulesError

MAX_BYTES = 1 << 18
_TAG = "tag:yaml.org,2002:"
_SCALARS = {f"{_TAG}{name}": name for name in ("str", "bool", "int", "float", "null")}


@dataclass(frozen=True)
class Item:
    """A value and the line of its key. A mapping's value is a dict of Items."""

    value: Any
    line: int


@dataclass(frozen=True)
class RawRule:
    """One rule as written. `index` counts from 0."""

    file: str
    index: int
    line: int
    name: Item | None
    match_class: Item | None
    replace_class: Item
    kwargs: dict[str, Item] = field(default_factory=dict)
    recursive: bool = True

    def error(self, message: str, key: str, line: int | None = None, allowed: Iterator[str] | Any = ()) -> RulesError:
        return RulesError(
            message, file=self.file, line=line or self.line, rule=self.index + 1, key=key, allowed=allowed
        )


def parse_rules(data: bytes, file: str) -> list[RawRule]:
    """The rules of a file's bytes. RulesError for everything that is not a list of well-formed rules."""
    try:
        root = compose(data, max_bytes=MAX_BYTES)
    except YamlError as error:
        raise RulesError(str(error), file=file, line=error.line) from None
    if not isinstance(root, yaml.SequenceNode):
        raise RulesError("a rules file is a list of rules (`- match: ...`)", file=file, line=_line(root))
    if not root.value:
        raise RulesError("the list of rules is empty", file=file, line=_line(root))
    return [_rule(node, file, index) for index, node in enumerate(root.value)]


def _line(node: yaml.Node | None) -> int:
    return 1 if node is None else int(node.start_mark.line) + 1


def _scalar(node: yaml.ScalarNode, file: str, rule: int, key: str) -> Any:
    if node.tag not in _SCALARS:
        kind = str(node.tag).removeprefix(_TAG)
        raise RulesError(
            f"a {kind} value ({node.value!r}) is not read here",
            file=file,
            line=_line(node),
            rule=rule,
            key=key,
            allowed=_SCALARS.values(),
        )
    try:
        return SafeConstructor().construct_object(node)
    except (ValueError, KeyError, IndexError, OverflowError, yaml.YAMLError):
        raise RulesError(
            f"{node.value!r} is not a {_SCALARS[node.tag]}", file=file, line=_line(node), rule=rule, key=key
        ) from None


def _item(node: yaml.Node, file: str, rule: int, key: str) -> Item:
    if isinstance(node, yaml.ScalarNode):
        return Item(_scalar(node, file, rule, key), _line(node))
    if isinstance(node, yaml.MappingNode):
        return Item(_mapping(node, file, rule, key), _line(node))
    raise RulesError("a list has no place here", file=file, line=_line(node), rule=rule, key=key)


def _mapping(node: yaml.Node, file: str, rule: int, key: str, allowed: tuple[str, ...] = ()) -> dict[Any, Item]:
    if not isinstance(node, yaml.MappingNode):
        raise RulesError("must be a mapping", file=file, line=_line(node), rule=rule, key=key, allowed=allowed)
    found: dict[Any, Item] = {}
    for key_node, value_node in node.value:

        def wrong(message: str, path: str, line: int = _line(key_node)) -> RulesError:
            return RulesError(message, file=file, line=line, rule=rule, key=path, allowed=allowed)

        if not isinstance(key_node, yaml.ScalarNode):
            raise wrong("a key must be a plain word", key)
        name = _scalar(key_node, file, rule, key)
        path = f"{key}.{name}" if key else str(name)
        if allowed and name not in allowed:
            raise wrong("unknown key", path)
        if name in found:
            raise wrong(f"written twice, first in line {found[name].line}", path)
        found[name] = Item(_item(value_node, file, rule, path).value, _line(key_node))
    return found


def _rule(node: yaml.Node, file: str, index: int) -> RawRule:
    line, number = _line(node), index + 1
    top = _mapping(node, file, number, "", ("match", "replace", "recursive"))
    for key in ("match", "replace"):
        if key not in top:
            raise RulesError("is missing", file=file, line=line, rule=number, key=key)
    match = _part(top["match"], file, number, "match", ("name", "class"))
    if not match:
        raise RulesError(
            "needs at least one of them",
            file=file,
            line=top["match"].line,
            rule=number,
            key="match",
            allowed=["name", "class"],
        )
    replace = _part(top["replace"], file, number, "replace", ("class", "kwargs"))
    kwargs: dict[str, Item] = {}
    if "kwargs" in replace and replace["kwargs"].value is not None:
        kwargs = _part(replace["kwargs"], file, number, "replace.kwargs", ())
    recursive = top.get("recursive", Item(True, line))
    _expect(recursive, bool, "true or false", file, number, "recursive")
    for key in ("name", "class"):
        if key in match:
            _expect(match[key], str, "a word", file, number, f"match.{key}")
    operator = replace.get("class", Item("default", top["replace"].line))
    _expect(operator, str, "a word", file, number, "replace.class")
    return RawRule(file, index, line, match.get("name"), match.get("class"), operator, kwargs, recursive.value)


def _part(item: Item, file: str, rule: int, key: str, allowed: tuple[str, ...]) -> dict[str, Item]:
    if not isinstance(item.value, dict):
        raise RulesError("must be a mapping", file=file, line=item.line, rule=rule, key=key, allowed=allowed)
    for name, value in item.value.items():
        if not isinstance(name, str) or (allowed and name not in allowed):
            raise RulesError("unknown key", file=file, line=value.line, rule=rule, key=f"{key}.{name}", allowed=allowed)
    return item.value


def _expect(item: Item, kind: type, what: str, file: str, rule: int, key: str) -> None:
    if not isinstance(item.value, kind):
        raise RulesError(f"must be {what}, not {item.value!r}", file=file, line=item.line, rule=rule, key=key)
