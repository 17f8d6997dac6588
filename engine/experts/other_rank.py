"""Routed experts that another rank computes: this one adds nothing to the sum over ranks."""

from __future__ import annotations

from typing import Any, Literal

from engine.experts.base import ExpertBackend, ExpertBuffers, ExpertTask
from engine.lora.adapter import ExpertLora
from engine.weights.store import ExpertStore


class OtherRankExperts(ExpertBackend):
    """Takes no weights. A step's `out` is zero."""

    follows_stream = True

    def __init__(self, buffers_on: Literal["cpu", "cuda"]) -> None:
        self.buffers_on = buffers_on

    def load_layer(self, layer: int, store: ExpertStore) -> None:
        """They are loaded where they are computed."""

    def set_adapter(self, slot: int, layers: dict[int, ExpertLora] | None) -> None:
        """As above."""

    def bind(self, layer: int, buffers: ExpertBuffers) -> ExpertTask:
        return ExpertTask(layer, buffers, None)

    def post(self, task: ExpertTask, stream: Any = None) -> None:
        task.buffers.out[: task.buffers.launch_rows].zero_()  # sums over ranks may be taken in place

    def wait(self, task: ExpertTask, stream: Any = None) -> None:
        """The stream's own order does it."""

    def close(self) -> None:
        """There is nothing to give back."""
