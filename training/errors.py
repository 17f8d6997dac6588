"""Errors of what is given to a training run."""

from __future__ import annotations

from engine.errors import UserError

_MOST = 1000  # characters of a message
_LAST = 300


class _OneLine(UserError):
    """What was written stands in the message: on one line, of a bounded length, without control characters."""

    def __init__(self, message: str, field: str | None = None) -> None:
        line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)
        super().__init__(line if len(line) <= _MOST else f"{line[: _MOST - _LAST]}...{line[-_LAST:]}", field)


class ConfigError(_OneLine):
    """A setting that cannot be. The message begins with file and line, or with the override."""


class DataError(_OneLine):
    """Data that cannot be trained on. The message begins with the file and the line, or the row."""
