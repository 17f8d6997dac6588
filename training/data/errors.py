"""Errors of training data."""

from __future__ import annotations

from engine.errors import UserError


class DataError(UserError):
    """Data that cannot be trained on. The message begins with the file and the line, or the row."""
