"""What a layer of the model is made of, and what a profiled step says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from engine.attention.base import AttentionBackend
from engine.experts.base import ExpertBackend, ExpertTask
from engine.linear.base import Linear, LoraBatch
from engine.lora.adapter import ExtraMlp

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


@dataclass
class DenseMlp:
    gate: Linear
    up: Linear
    down: Linear


@dataclass
class SparseMlp:
    """`extra` holds adapters' own dense MLPs by slot; the router's weight is kept in float32."""

    router: Linear
    backend: ExpertBackend
    task: ExpertTask
    second: ExpertTask | None = None  # of the second buffer set, if there is one (`add_buffer_set`)
    extra: dict[int, list[ExtraMlp]] = field(default_factory=dict)


@dataclass
class Layer:
    input_norm: torch.Tensor
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    attention: AttentionBackend
    post_norm: torch.Tensor
    mlp: DenseMlp | SparseMlp
    joined: Callable[[torch.Tensor, LoraBatch | None], list[torch.Tensor]] | None = None  # q, k and v at once

    def qkv(self, x: torch.Tensor, lora: LoraBatch | None) -> list[torch.Tensor]:
        return [self.q(x, lora), self.k(x, lora), self.v(x, lora)] if self.joined is None else self.joined(x, lora)
