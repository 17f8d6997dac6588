"""What every part of a layer states: its modules, what it keeps in the cache, how ranks divide it. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

Shape = tuple[int, ...]
P = TypeVar("P", bound="Part")

# Projections that ranks divide, by the last part of their name; all else is whole on every rank.
BY_OUTPUTS = ("q_proj", "q_b_proj", "k_proj", "v_proj", "kv_b_proj", "gate_proj", "up_proj")
BY_INPUTS = ("o_proj", "down_proj")
BY_HEADS = ("self_attn.sinks",)  # vectors of a value a head, which are divided with the heads


@dataclass(frozen=True)
class Half:
    """Of the rows that a projection from latents has of each head, the keys' or the values', by heads: keys [heads,
    latent, rows], transposed, values [heads, rows, latent]. In GGUF `blk.N.<gguf>.weight`."""

    gguf: str
    shape: Shape


@dataclass(frozen=True)
class Module:
    """A module of one layer. Its weight is `model.layers.N.<name>.weight` here and `blk.N.<gguf>.weight` in GGUF.
    Containers have none; routed experts have names of their own (`engine.weights.layout`)."""

    name: str
    kind: str  # "attention", "moe_block", "experts", "mlp", "norm", "linear": what rules may replace (`rules.Family`)
    gguf: str = ""
    shape: Shape = ()  # of the weight in C order, [out, in] of a projection; () if there is none
    bias: bool = False
    rows: Literal["", "rotary_pairs"] = ""  # GGUF's order of the rows, where it is another (`engine.weights.gguf`)
    head_rows: int = 0  # rows of a head, where `rows` speaks of heads
    halves: tuple[Half, Half] | None = None  # of latent keys and values: what GGUF may have instead of the whole


@dataclass(frozen=True)
class Vector:
    """A tensor of a layer that belongs to no module with a weight: `model.layers.N.<name>`, `blk.N.<gguf>` in GGUF.
    `negative_log`: safetensors hold log(-x), GGUF does not."""

    name: str
    gguf: str
    shape: Shape
    negative_log: bool = False


@dataclass(frozen=True)
class Plane:
    """A part of what a position keeps in the cache of one layer: `heads` vectors of `size` values."""

    heads: int
    size: int


@dataclass(frozen=True)
class Cache:
    """What one layer keeps of each position, in blocks of positions. `window`: how many of the last positions a query
    reads, its own included; None: all. What lies before every later query's window is never read again. `state_bytes`:
    what it keeps of each sequence, whatever its length; `kept_bytes`: beside that of each draft, until it is known
    whether it is right."""

    planes: tuple[Plane, ...]
    window: int | None = None
    state_bytes: int = 0
    kept_bytes: int = 0

    def position_bytes(self, element_bytes: int, scale_bytes: int = 0) -> int:
        """`scale_bytes`: of each vector beside its elements."""
        return sum(plane.heads * (plane.size * element_bytes + scale_bytes) for plane in self.planes)


@dataclass(frozen=True)
class Divided:
    """A size that ranks divide, by the name that configurations give it; each part must be a multiple of `unit`."""

    name: str
    size: int
    unit: int = 1


class Part(Protocol):
    """An attention or an MLP. `hidden`: the width of the residual stream."""

    def modules(self, hidden: int) -> Iterator[Module]:
        """Parents before children, with names from the layer on ("self_attn.q_proj")."""

    def vectors(self, hidden: int) -> Iterator[Vector]:
        """Its tensors beside modules."""

    def row_values(self, hidden: int) -> int:
        """Values that a row of a step takes in its buffers, beside the residual stream."""

    def divided(self, step: int) -> Iterator[Divided]:
        """What ranks divide. `step`: what a rank's width of a projection must be a multiple of."""

    def of_rank(self: P, ranks: int) -> P:
        """What one of so many ranks computes of it."""

    def numbers(self) -> dict[str, float]:
        """Its sizes by the names of transformers' configurations: two files of one model agree on them."""


class Attention(Part, Protocol):
    """An attention, named `self_attn` in its layer."""

    @property
    def cache(self) -> Cache: ...

    def trained_values(self, hidden: int) -> int:
        """`row_values` of a row of training beside serving: what forward keeps for backward."""
