"""Gated delta net as data: linear attention that keeps a state instead of keys and values. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from engine.architectures.parts.base import Cache, Divided, Module, Vector

_F32 = 4
_AT = "self_attn"
_STORED = "linear_attn"  # how safetensors and adapters call the whole module
# Projections of one value a head, computed in float32 as routers are: their results decide how a state decays.
GATES = (f"{_AT}.in_proj_ba", f"{_AT}.in_proj_b", f"{_AT}.in_proj_a")


@dataclass(frozen=True)
class DeltaNet:
    """`value_heads` states S [key_dim, value_dim] of float32, `value_heads / key_heads` of them share a key and query.

    q, k, v, z, b, a = projections of x
    q, k, v = silu(depthwise causal convolution over the last `kernel` positions) ; q, k = q / |q|, k / |k|
    S = exp(g) S ; S += k (v - k.S)^T sigmoid(b) ; g = -exp(A_log) softplus(a + dt_bias)       by position and head
    out = out_proj(norm(q.S / sqrt(key_dim)) * silu(z))

    `fused`: one projection has q, k, v, z by key heads, otherwise one has [q | k | v] and another z. `fused_gates`: one
    has b, a by key heads, otherwise each has its own.
    `tiled`: value head h has the key of head h % key_heads; otherwise of head h // (value_heads / key_heads).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    fused: bool
    fused_gates: bool
    tiled: bool = False

    FUSED_TARGETS: ClassVar[tuple[str, ...]] = (f"{_AT}.qkvz_proj", GATES[0], f"{_AT}.out_proj")
    TARGETS: ClassVar[tuple[str, ...]] = (f"{_AT}.qkv_proj", f"{_AT}.z_proj", *GATES[1:], f"{_AT}.out_proj")
    # (what files say, what is said here)
    STORED: ClassVar[tuple[tuple[str, str], ...]] = (
        *((f"{_STORED}.in_proj_{part}", f"{_AT}.{part}_proj") for part in ("qkvz", "qkv", "z")),
        *((f"{_STORED}.{part}", f"{_AT}.{part}") for part in ("in_proj_ba", "in_proj_b", "in_proj_a", "out_proj")),
        *((f"{_STORED}.{part}", f"{_AT}.{part}") for part in ("conv1d", "dt_bias", "norm")),
        (f"{_STORED}.A_log", f"{_AT}.decay"),
    )

    @property
    def of_safetensors(self) -> DeltaNet:
        """The same with the projections and the order of value heads that safetensors and adapters have."""
        return replace(self, fused=self.fused_gates, tiled=False)

    @property
    def of_gguf(self) -> DeltaNet:
        """The same as llama.cpp writes it."""
        return replace(self, fused=False, tiled=not self.fused_gates and self.value_heads > self.key_heads)

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys, values."""
        return 2 * self.key_width + self.value_width

    @property
    def cache(self) -> Cache:
        """The states, and the positions that the next convolution looks back at, all float32; of drafts what comes in,
        and b and a."""
        values = self.value_heads * self.key_dim * self.value_dim + (self.kernel - 1) * self.channels
        kept = self.channels + 2 * self.value_heads
        return Cache((), state_bytes=_F32 * values, kept_bytes=_F32 * kept)

    def modules(self, hidden: int) -> Iterator[Module]:
        heads, values = self.value_heads, self.value_width
        yield Module(_AT, "attention")
        if self.fused:
            yield Module(f"{_AT}.qkvz_proj", "linear", "ssm_in", (self.channels + values, hidden))
        else:
            yield Module(f"{_AT}.qkv_proj", "linear", "attn_qkv", (self.channels, hidden))
            yield Module(f"{_AT}.z_proj", "linear", "attn_gate", (values, hidden))
        if self.fused_gates:
            yield Module(f"{_AT}.in_proj_ba", "linear", "ssm_ba", (2 * heads, hidden))
        else:
            yield Module(f"{_AT}.in_proj_b", "linear", "ssm_beta", (heads, hidden))
            yield Module(f"{_AT}.in_proj_a", "linear", "ssm_alpha", (heads, hidden))
        yield Module(f"{_AT}.out_proj", "linear", "ssm_out", (hidden, values))

    def vectors(self, hidden: int) -> Iterator[Vector]:
        yield Vector(f"{_AT}.conv1d.weight", "ssm_conv1d.weight", (self.channels, 1, self.kernel))
        yield Vector(f"{_AT}.decay", "ssm_a", (self.value_heads,), negative_log=True)
        yield Vector(f"{_AT}.dt_bias", "ssm_dt.bias", (self.value_heads,))
        yield Vector(f"{_AT}.norm.weight", "ssm_norm.weight", (self.value_dim,))

    def row_values(self, hidden: int) -> int:
        """Queries and keys are repeated for each value head, and each chunk solves a triangle of its positions."""
        return 3 * self.channels + 2 * self.value_width + 4 * self.value_heads * (self.key_dim + self.value_dim)

    def trained_values(self, hidden: int) -> int:
        """What comes in, in float32; keys and queries before and behind their norm; of each value head copies of these
        and of values, scaled, the products of a chunk's 64 positions with one another, and a chunk's part of the state
        before it. Measured."""
        d, e = self.key_dim, self.value_dim
        heads = self.value_heads * (6 * d + 8 * e + d * e // 64 + 6 * 64)
        return self.channels + self.value_width + 4 * self.key_width + heads

    def divided(self, step: int) -> Iterator[Divided]:
        yield Divided("linear_num_key_heads", self.key_heads)
        yield Divided("linear_num_value_heads x linear_value_head_dim", self.value_width, step)
        yield Divided("the width of linear attention's convolution", self.channels, step)

    def of_rank(self, ranks: int) -> DeltaNet:
        """Key heads, with the value heads that use them."""
        return replace(self, key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)

    def numbers(self) -> dict[str, float]:
        return {
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.key_dim,
            "linear_value_head_dim": self.value_dim,
            "linear_conv_kernel_dim": self.kernel,
        }
