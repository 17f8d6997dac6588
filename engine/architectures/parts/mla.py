"""Multi-head latent attention as data. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from engine.architectures.parts.base import Cache, Divided, Half, Module, Plane, Vector
from engine.architectures.parts.rotation import Rotation

NORM_EPS = 1e-6  # of the norms inside, in transformers' classes, whatever a configuration says of the others


@dataclass(frozen=True)
class Latent:
    """Causal softmax attention whose keys and values are made of one latent vector a position, the same for all heads.

    q = q_b(norm(q_a x)) or q_proj x          per head [nope | rope]
    [latent | k_rope] = kv_a x ; c = norm(latent)       the rope parts are rotated; [c | k_rope] is what the cache keeps
    [k_nope | v] = kv_b c                      per head; the key is [k_nope | k_rope]

    Expanded, attention is over these keys and values. Absorbed, kv_b is applied to queries and results instead:
    score = (W_k^T q_nope) . c + q_rope . k_rope ; out = W_v (sum p c). `q_rank` None: queries have one projection.
    `rotation.dim` is the width of the rope part; `interleaved`: values that are rotated together are neighbours, not
    halves apart. `bias`: of q_a, kv_a and o.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    value_dim: int
    rotation: Rotation
    interleaved: bool = True
    bias: bool = False
    norm_eps: float = NORM_EPS

    TARGETS: ClassVar[tuple[str, ...]] = tuple(
        f"self_attn.{part}" for part in ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    )

    @property
    def rope_dim(self) -> int:
        return self.rotation.dim

    @property
    def width(self) -> int:
        """Values that the cache keeps of a position."""
        return self.kv_rank + self.rope_dim

    @property
    def q_width(self) -> int:
        return self.heads * (self.nope_dim + self.rope_dim)

    @property
    def expanded_dim(self) -> int:
        """Rows of kv_b that are of one head."""
        return self.nope_dim + self.value_dim

    @property
    def scale(self) -> float:
        """Of the scores."""
        weight = 0.0 if self.rotation.scaling is None else self.rotation.scaling.all_dim_scale
        return (weight * weight if weight else 1.0) / math.sqrt(self.nope_dim + self.rope_dim)

    @property
    def expands_from(self) -> int | None:
        """The least number of a sequence's tokens in a step for which expanding takes fewer multiplications than
        absorbing; None if there is none. Per head and position of the context, expanding costs kv_rank (nope + value)
        once, and saves kv_rank + width - (nope + rope) - value for each of the tokens."""
        saved = self.kv_rank + self.width - self.nope_dim - self.rope_dim - self.value_dim
        return None if saved <= 0 else -(-self.kv_rank * self.expanded_dim // saved)

    @property
    def cache(self) -> Cache:
        return Cache((Plane(1, self.width),))

    def modules(self, hidden: int) -> Iterator[Module]:
        at, heads = "self_attn", self.heads
        yield Module(at, "attention")
        if self.q_rank is None:
            yield Module(f"{at}.q_proj", "linear", "attn_q", (self.q_width, hidden))
        else:
            yield Module(f"{at}.q_a_proj", "linear", "attn_q_a", (self.q_rank, hidden), self.bias)
            yield Module(f"{at}.q_a_layernorm", "norm", "attn_q_a_norm", (self.q_rank,))
            yield Module(f"{at}.q_b_proj", "linear", "attn_q_b", (self.q_width, self.q_rank))
        yield Module(f"{at}.kv_a_proj_with_mqa", "linear", "attn_kv_a_mqa", (self.width, hidden), self.bias)
        yield Module(f"{at}.kv_a_layernorm", "norm", "attn_kv_a_norm", (self.kv_rank,))
        keys = Half("attn_k_b", (heads, self.kv_rank, self.nope_dim))
        values = Half("attn_v_b", (heads, self.value_dim, self.kv_rank))
        yield Module(
            f"{at}.kv_b_proj", "linear", "attn_kv_b", (heads * self.expanded_dim, self.kv_rank), halves=(keys, values)
        )
        yield Module(f"{at}.o_proj", "linear", "attn_output", (hidden, heads * self.value_dim), self.bias)

    def vectors(self, hidden: int) -> Iterator[Vector]:
        return iter(())

    def row_values(self, hidden: int) -> int:
        mixed = self.heads * (self.width + self.kv_rank + self.value_dim)
        return 2 * ((self.q_rank or 0) + self.q_width + self.width) + mixed

    def trained_values(self, hidden: int) -> int:
        return self.row_values(hidden)

    def divided(self, step: int) -> Iterator[Divided]:
        yield Divided("num_attention_heads", self.heads)
        yield Divided("num_attention_heads x v_head_dim", self.heads * self.value_dim, step)
        yield Divided("num_attention_heads x qk_head_dim", self.q_width, step)

    def of_rank(self, ranks: int) -> Latent:
        return replace(self, heads=self.heads // ranks)

    def numbers(self) -> dict[str, float]:
        return {
            "num_attention_heads": self.heads,
            "q_lora_rank": self.q_rank or 0,
            "kv_lora_rank": self.kv_rank,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.value_dim,
            "rope_theta": self.rotation.theta,
        }
