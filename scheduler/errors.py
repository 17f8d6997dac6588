"""Faults of the scheduler or of its caller, as opposed to `AdmissionError`, which is the user's."""

from __future__ import annotations


class IntegrityError(Exception):
    """The scheduler's state contradicts itself, or it was called against its contract. The message says where."""
