"""Rotary position embedding, NeoX style, with its scaling types (linear, dynamic NTK, YaRN).

Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071). The numbers equal transformers' rope utilities.
"""

from __future__ import annotations

import math

import torch

from engine.architectures.parts.rotation import RopeScaling, Rotation, mscale
from engine.errors import ModelFileError


def inverse_frequencies(rotation: Rotation, max_len: int) -> tuple[torch.Tensor, float]:
    """Angles per position, float32 [dim / 2], and the factor that cos and sin are multiplied by.

    `dynamic` depends on the length of a sequence; cached keys cannot be rotated again, so one base serves all: the
    trained one if `max_len` stays within the trained length, else the one for `max_len`.
    """
    exponents = torch.arange(0, rotation.dim, 2, dtype=torch.int64).float() / rotation.dim
    plain = 1.0 / (rotation.theta**exponents)
    scaling = rotation.scaling
    if scaling is None or scaling.kind == "default":
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    trained = scaling.original_max_position_embeddings or rotation.positions
    if scaling.kind == "dynamic":
        if max_len <= trained:
            return plain, 1.0
        stretch = scaling.factor * max_len / trained - (scaling.factor - 1)
        theta = rotation.theta * stretch ** (rotation.dim / (rotation.dim - 2))
        return 1.0 / (theta**exponents), 1.0
    if scaling.kind == "yarn":
        return _yarn(rotation, scaling, plain, trained)
    raise ModelFileError(
        f"rope scaling {scaling.kind!r} is not supported: linear, dynamic and yarn are", field="rope_scaling"
    )


def _yarn(rotation: Rotation, scaling: RopeScaling, plain: torch.Tensor, trained: int) -> tuple[torch.Tensor, float]:
    dim, base = rotation.dim, rotation.theta

    def dim_of(rotations: float) -> float:  # the dimension that turns this often over the trained length
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.extra.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    keep = 1 - ramp  # 1 where the frequency is fast enough to be left alone
    factor = scaling.factor

    attention = scaling.attention_factor
    if attention is None:
        top, bottom = scaling.extra.get("mscale"), scaling.extra.get("mscale_all_dim")
        attention = mscale(factor, top) / mscale(factor, bottom) if top and bottom else mscale(factor)
    return plain / factor * (1 - keep) + plain * keep, float(attention)


class Rope:
    """cos and sin of every position up to `max_len`, float32 [max_len, dim / 2]."""

    def __init__(self, rotation: Rotation, max_len: int, device: torch.device) -> None:
        frequencies, factor = inverse_frequencies(rotation, max_len)
        self.dim = rotation.dim
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)
        self.cos = (angles.cos() * factor).to(device)
        self.sin = (angles.sin() * factor).to(device)

    def apply(self, x: torch.Tensor, positions: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
        """Rotate the first `dim` values of x [T, heads, head_dim] to its positions [T], in float32; x's dtype.
        `interleaved`: neighbours are rotated together; they come out as halves, the first of each pair before all
        second ones."""
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        part = x[..., : self.dim].float()
        first, second = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
        return turned if self.dim == x.shape[-1] else torch.cat((turned, x[..., self.dim :]), dim=-1)
