"""What rules say about a module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Backend = Literal["reference", "native", "kt", "gpu", "hybrid", "flashinfer"]
NO_RULE = -1


@dataclass(frozen=True)
class Choice:
    """A module's backend and place.

    `device` serves decode, `prefill_device` prefill; each "cpu", "cuda", "cuda:N" or "auto" (place() with a machine
    leaves no "auto"). They differ for experts only: host experts whose prefill is streamed to a GPU.
    `options`, experts: `method` (kt: kt_kernel's class), `quantise` (native, hybrid: int8 or int4 of unquantised
    weights), `prefill_threshold` (rows of a chunk from which a layer is streamed: "auto", or 0 = never; only if the
    devices differ, or hybrid), `cpu` and `gpu_memory` (hybrid).
    `options`, attention: `prefill` (flashinfer's kernel: auto, fa2, fa3).
    `options`, the model: `prefill_threshold`, `transfer_map` ({first layer: device}).
    `rule_index` counts from 0, NO_RULE if nothing matched; `line` is the rule's line in its file, 0 if none.
    """

    backend: Backend
    device: str = "auto"
    prefill_device: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    rule_index: int = NO_RULE
    line: int = 0


DEFAULT_CHOICE = Choice("reference")


@dataclass(frozen=True)
class Note:
    """Something a rules file says that is accepted but changes nothing here. The server prints it."""

    rule: int  # from 1
    line: int
    key: str
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: rule {self.rule}: {self.key}: {self.text}"
