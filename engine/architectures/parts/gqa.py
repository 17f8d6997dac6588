"""Grouped-query attention as data. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from engine.architectures.parts.base import Cache, Divided, Module, Plane, Vector
from engine.architectures.parts.rotation import Rotation


@dataclass(frozen=True)
class GroupedQuery:
    """Causal softmax attention; `heads` queries share `kv_heads` keys and values of `head_dim` values."""

    heads: int
    kv_heads: int
    head_dim: int
    rotation: Rotation
    bias: bool = False  # of q, k and v
    output_bias: bool = False
    qk_norm: Literal["none", "head", "whole"] = "none"  # an RMS norm of each head's query and key, or of all of them
    gated: bool = False  # q_proj has [query | gate] of each head; sigmoid(gate) multiplies what o_proj takes
    paired_rows: bool = False  # GGUF stores rows of q and k so that rotated values are neighbours
    window: int | None = None  # a query sees this many of the last positions, its own included
    sinks: bool = False  # a logit of each head beside the scores, whose share of the softmax goes nowhere

    SINKS: ClassVar[str] = "self_attn.sinks"
    TARGETS: ClassVar[tuple[str, ...]] = tuple(f"self_attn.{part}_proj" for part in "qkvo")

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def cache(self) -> Cache:
        return Cache((Plane(self.kv_heads, self.head_dim), Plane(self.kv_heads, self.head_dim)), self.window)

    def modules(self, hidden: int) -> Iterator[Module]:
        q, kv, bias = self.q_width, self.kv_width, self.bias
        order: Literal["", "rotary_pairs"] = "rotary_pairs" if self.paired_rows else ""
        yield Module("self_attn", "attention")
        rows = 2 * q if self.gated else q
        yield Module("self_attn.q_proj", "linear", "attn_q", (rows, hidden), bias, order, self.head_dim)
        yield Module("self_attn.k_proj", "linear", "attn_k", (kv, hidden), bias, order, self.head_dim)
        yield Module("self_attn.v_proj", "linear", "attn_v", (kv, hidden), bias)
        yield Module("self_attn.o_proj", "linear", "attn_output", (hidden, q), self.output_bias)
        if self.qk_norm != "none":
            whole = self.qk_norm == "whole"
            yield Module("self_attn.q_norm", "norm", "attn_q_norm", (q if whole else self.head_dim,))
            yield Module("self_attn.k_norm", "norm", "attn_k_norm", (kv if whole else self.head_dim,))

    def vectors(self, hidden: int) -> Iterator[Vector]:
        if self.sinks:
            yield Vector(self.SINKS, "attn_sinks.weight", (self.heads,))

    def row_values(self, hidden: int) -> int:
        return 2 * ((2 if self.gated else 1) * self.q_width + 2 * self.kv_width)

    def trained_values(self, hidden: int) -> int:
        return self.row_values(hidden)

    def divided(self, step: int) -> Iterator[Divided]:
        yield Divided("num_key_value_heads", self.kv_heads)
        yield Divided("num_attention_heads", self.heads)
        yield Divided("num_attention_heads x head_dim", self.q_width, step)

    def of_rank(self, ranks: int) -> GroupedQuery:
        return replace(self, heads=self.heads // ranks, kv_heads=self.kv_heads // ranks)

    def numbers(self) -> dict[str, float]:
        partial = {} if self.rotation.dim == self.head_dim else {"rotary_dim": self.rotation.dim}
        window = {} if self.window is None else {"sliding_window": self.window}
        return {
            **partial,
            **window,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.rotation.theta,
        }
