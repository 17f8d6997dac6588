"""The error of a training configuration."""

from __future__ import annotations

from engine.errors import UserError


class ConfigError(UserError):
    """A setting that cannot be. The message begins with file and line, or with the override."""
