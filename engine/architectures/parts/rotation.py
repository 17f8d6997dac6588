"""Rotary position embedding as data. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RopeScaling:
    """`kind` "linear", "dynamic" or "yarn", as transformers names them; the rest as in its rope_parameters."""

    kind: str
    factor: float
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    extra: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def all_dim_scale(self) -> float:
        """What `mscale_all_dim` makes of latent attention's queries and keys each, 0 without one."""
        weight = self.extra.get("mscale_all_dim")
        return mscale(self.factor, weight) if weight else 0.0


def mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's factor of cosines and sines for positions stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True)
class Rotation:
    """The first `dim` values of a head are rotated, value i together with value i + dim / 2; the rest stay.
    `positions`: the longest length that the model was made for."""

    dim: int
    theta: float
    positions: int
    scaling: RopeScaling | None = None

    @property
    def stretched_positions(self) -> int:
        """Positions that scaling reaches: factor times the original length, at least `positions`."""
        scaling = self.scaling
        if scaling is None or scaling.original_max_position_embeddings is None:
            return self.positions
        return max(self.positions, int(scaling.factor * scaling.original_max_position_embeddings))
