"""Schemas without what no grammar can hold: as little as possible is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_MOST_CHECKS = 400  # compilations of one schema
_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OF_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_OF_ONE = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
_KEPT_LONGEST = ("type", "properties", "required", "items", "$ref", "anyOf", "enum", "const")
_DEFINITIONS = ("$defs", "definitions")

Schema = dict[str, Any]


class Looser:
    """`sound` says of a schema whether it is a grammar. `dropped`: places (JSON pointers) of what was left out."""

    def __init__(self, sound: Callable[[Schema], bool]) -> None:
        self._sound = sound
        self._checks = 0
        self.dropped: list[str] = []

    def of(self, schema: Schema) -> Schema:
        """The schema without what cannot be held; any object where that takes too long to find out."""
        definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
        loose = self._loose(schema, "", definitions)
        if isinstance(loose, dict) and self._holds(loose, {}):
            return loose
        self.dropped = ["the schema"]
        return {"type": "object"}

    def _holds(self, schema: Any, definitions: Schema) -> bool:
        """Whether a subschema, with the definitions that it may refer to, is a grammar. False once too many were asked
        about."""
        self._checks += 1
        return self._checks <= _MOST_CHECKS and (not isinstance(schema, dict) or self._sound({**definitions, **schema}))

    def _loose(self, schema: Any, place: str, definitions: Schema) -> Any:
        if not isinstance(schema, dict) or self._holds(schema, definitions):
            return schema
        loose = dict(schema)
        for key, name, inner in _inner(schema):
            where = f"{place}/{key}" if name is None else f"{place}/{key}/{name}"
            made = self._loose(inner, where, definitions if key not in _DEFINITIONS else {})
            if name is None:
                loose[key] = made
            elif isinstance(loose[key], list):
                loose[key] = [*loose[key]]
                loose[key][int(name)] = made
            else:
                loose[key] = {**loose[key], name: made}
        order = sorted(loose, key=lambda key: _KEPT_LONGEST.index(key) if key in _KEPT_LONGEST else -1)
        for key in order:
            if self._holds(loose, definitions):
                break
            without = {other: value for other, value in loose.items() if other != key}
            if self._holds(without, definitions):
                self.dropped.append(f"{place}/{key}")
                return without
        if self._holds(loose, definitions):
            return loose
        return self._without_all(loose, order, place, definitions)

    def _without_all(self, loose: Schema, order: list[str], place: str, definitions: Schema) -> Schema:
        """Several keywords are in the way: one after another goes until the rest holds."""
        for key in order:
            loose = {other: value for other, value in loose.items() if other != key}
            self.dropped.append(f"{place}/{key}")
            if self._holds(loose, definitions):
                break
        return loose


def _inner(schema: Schema) -> Iterator[tuple[str, str | None, Any]]:
    """(keyword, name or number in it, subschema) of each subschema, definitions first."""
    for key in sorted(schema, key=lambda key: key not in _DEFINITIONS):
        value = schema[key]
        if key in _OF_SCHEMAS and isinstance(value, dict):
            yield from ((key, name, inner) for name, inner in value.items())
        elif key in _OF_LISTS and isinstance(value, list):
            yield from ((key, str(i), inner) for i, inner in enumerate(value))
        elif key in _OF_ONE and isinstance(value, dict):
            yield key, None, value
