"""What goes into a step of the model and what comes out, whoever executes it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from engine.attention.base import BatchLayout
from engine.linear.base import LoraBatch

Observer = Callable[[str, torch.Tensor], None]  # called with (name of the place, its value) by `ktserve check`


@dataclass
class Trace:
    """What a profiled step says of its experts. `ids` of each sparse layer may still be on a device."""

    ids: list[torch.Tensor] = field(default_factory=list)  # int64 [T, k]
    experts_s: float = 0.0  # host time from post to wait; a GPU's stream goes on by itself meanwhile

    @cached_property
    def experts_touched(self) -> list[int]:
        """Distinct experts per sparse layer. Waits for the step."""
        return [torch.unique(ids).numel() for ids in self.ids]


class OutputKind(enum.Enum):
    """What is to be computed of the kept tokens."""

    HIDDEN = "hidden"
    LOGITS = "logits"
    GREEDY = "greedy"  # the token of the largest logit


@dataclass(frozen=True)
class StepInput:
    """T tokens. `keep` int64 [K], rising: the tokens that are wanted, None for all; what the others would have been may
    be left out. `bsz` int32 [1]: how many of the tokens are valid, None for all."""

    ids: torch.Tensor  # int64 [T]
    batch: BatchLayout
    lora: LoraBatch | None = None
    keep: torch.Tensor | None = None
    output_kind: OutputKind = OutputKind.HIDDEN
    bsz: torch.Tensor | None = None
    trace: Trace | None = None  # filled
    observe: Observer | None = None


@dataclass(frozen=True)
class StepOutput:
    """Of the K kept tokens; `logits` or `greedy` if they were wanted."""

    hidden: torch.Tensor  # [K, H], after the final norm
    logits: torch.Tensor | None = None  # float32 [K, V]
    greedy: torch.Tensor | None = None  # int64 [K]; NOT_FINITE where the largest logit is infinite or no number


class Executor(Protocol):
    """The model itself, or a faster way with the same results."""

    def forward(self, step: StepInput) -> StepOutput:
        """The device's part of a step that the model's attention has planned."""
