"""The contract between the engine's loop and what trains beside it."""

from __future__ import annotations

from typing import Protocol

from engine.messages import Tune


class Tuner(Protocol):
    """Trains adapters over the served weights, on the engine's thread, a piece at a time: no piece is longer than a
    layer of a micro-batch takes forward and back."""

    def handle(self, message: Tune) -> None:
        """Take an order. Whatever is wrong with it is answered, never raised."""

    @property
    def ready(self) -> bool:
        """Whether `advance` would compute something now."""

    @property
    def busy(self) -> bool:
        """Whether orders are left, those included that wait for files."""

    def advance(self, seconds: float) -> float:
        """Compute pieces until so long has passed, at least one; returns how long it took."""

    def stats(self) -> dict[str, float | int]:
        """Counters for /metrics."""

    def close(self) -> None:
        """No thread is left. Orders that wait are not answered."""
