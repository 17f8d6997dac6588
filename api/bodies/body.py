"""A body names every field that its clients send, and what becomes of it: one table.

Parsing follows it (api/bodies/parsing.py), docs/api.md is written from it (api/dialects/reference.py), and a test
walks it. A field of the body's model is *supported*; an *alias* is another name of one; a *no-op* is accepted with the
values listed (none: any) and changes nothing; a *refused* one would change the answer and is a 400, except with the
values listed, with which it asks for what happens anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict


class Status(Enum):
    SUPPORTED = "supported"
    ALIAS = "alias"
    NO_OP = "no-op"
    REFUSED = "refused"


@dataclass(frozen=True)
class Field:
    """`note`: what the field does, or why it does nothing or is refused. `values`: see above; `of`: the field that an
    alias means."""

    name: str
    status: Status
    note: str
    values: tuple[Any, ...] = ()
    of: str | None = None

    def takes(self, value: Any) -> bool:
        """Whether a field that is not supported may have this value."""
        if self.status is Status.NO_OP and not self.values:
            return True
        return any(one == value and isinstance(one, bool) == isinstance(value, bool) for one in self.values)


def supported(name: str, note: str) -> Field:
    return Field(name, Status.SUPPORTED, note)


def alias(name: str, of: str) -> Field:
    return Field(name, Status.ALIAS, f"another name of `{of}`", of=of)


def no_op(name: str, note: str, *values: Any) -> Field:
    return Field(name, Status.NO_OP, note, values)


def refused(name: str, note: str, *but: Any) -> Field:
    return Field(name, Status.REFUSED, note, but)


class Body(BaseModel):
    """A body, or a part of one. `FIELDS` is its table; without one the fields of its model are all supported. `SHAPES`:
    what the OpenAPI document says of fields that parsing checks by hand (api/bodies/shapes.py). `ONE_OF`: fields of
    which it has one; `NEEDS`: fields that need others. `STREAM`: the type of answers that are streams."""

    FIELDS: ClassVar[tuple[Field, ...]] = ()
    SHAPES: ClassVar[Mapping[str, dict[str, Any]]] = {}
    ONE_OF: ClassVar[tuple[str, ...]] = ()
    NEEDS: ClassVar[Mapping[str, list[str]]] = {}
    STREAM: ClassVar[str] = "text/event-stream"
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


@cache
def fields_of(kind: type[Body]) -> Mapping[str, Field]:
    """The table of a body's fields by name."""
    return {field.name: field for field in kind.FIELDS} or {name: supported(name, "") for name in names_of(kind)}


@cache
def names_of(kind: type[Body]) -> frozenset[str]:
    """The fields of a body's model, as clients write them."""
    return frozenset(info.alias or name for name, info in kind.model_fields.items())


@cache
def parts_of(kind: type[Body]) -> Mapping[str, type[Body]]:
    """The fields that have fields of their own."""
    annotations = {info.alias or name: info.annotation for name, info in kind.model_fields.items()}
    candidates = [(name, part) for name, kinds in annotations.items() for part in (*get_args(kinds), kinds)]
    return {name: part for name, part in candidates if isinstance(part, type) and issubclass(part, Body)}
