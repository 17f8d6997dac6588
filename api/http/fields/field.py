"""Every field that clients of the generating endpoints send, and what becomes of it: one table.

Parsing follows it (api/http/fields/parsing.py), docs/api.md is written from it, and a test
walks it. A field of the request's model (api/http/bodies) is *supported*; an *alias* is another name of one; a
*no-op* is accepted with the values listed (none: any) and changes nothing; a *refused* one would change the answer
and is a 400, except with the values listed, with which it asks for what happens anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


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
