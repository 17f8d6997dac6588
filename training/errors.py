"""Errors of what is given to a training run."""

from __future__ import annotations

from engine.errors import UserError


class ConfigError(UserError):
    """A setting that cannot be. The message begins with file and line, or with the override."""


class DataError(UserError):
    """Data that cannot be trained on. The message begins with the file and the line, or the row."""
