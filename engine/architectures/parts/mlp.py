"""MLPs as data: dense, or routed experts with a router and perhaps a shared expert. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from engine.architectures.parts.base import Divided, Module, Vector
from engine.architectures.parts.delta import GATES

ROUTER = "mlp.gate"
ROUTERS = (ROUTER, "mlp.shared_expert_gate")
FLOAT32_MODULES = (*ROUTERS, *GATES)  # computed in float32, whatever the rest is computed in
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Router:
    """How a token's experts are chosen and weighted, from float32 logits:

    s = softmax(logits) or sigmoid(logits) ; c = s + bias              the bias chooses only
    of each group of experts the sum of the 2 largest c, or the largest ; the best `top_groups` groups are kept
    ids = the largest c of these ; w = s[ids]
    w /= sum(w) + normalise, unless that is None ; w *= scale
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: float | None = 0.0
    scale: float = 1.0
    bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"

    def check(self, experts: int, top_k: int) -> str | None:
        """Why so many experts cannot be routed so, in the words of configurations; None if they can."""
        if experts % self.groups:
            return f"n_group is {self.groups}, not a divisor of {experts} experts"
        if not 1 <= self.top_groups <= self.groups:
            return f"topk_group is {self.top_groups}; allowed is 1 to n_group {self.groups}"
        if top_k > (left := self.top_groups * (experts // self.groups)):
            return f"num_experts_per_tok is {top_k}; the {self.top_groups} groups of topk_group hold {left} experts"
        return None

    @property
    def plain(self) -> bool:
        """Whether the largest probabilities are taken, and at most divided by their sum."""
        return self == Router(normalise=self.normalise) and not self.normalise


@dataclass(frozen=True)
class Activation:
    """What becomes of gate and up: silu(gate) * up; or, with a `limit`,

    g = min(gate, limit) ; u = clamp(up, -limit, limit) ; g * sigmoid(alpha * g) * (u + 1)
    """

    limit: float | None = None
    alpha: float = 1.0


SILU = Activation()


@dataclass(frozen=True)
class Dense:
    """down(silu(gate(x)) * up(x)), `intermediate` values wide. `name`: of the module in its layer; `gguf`: what GGUF
    adds to its names; `size`: how configurations call its width."""

    intermediate: int
    name: str = "mlp"
    gguf: str = ""
    size: str = "intermediate_size"

    TARGETS: ClassVar[tuple[str, ...]] = tuple(f"mlp.{part}" for part in _PROJECTIONS)

    def modules(self, hidden: int) -> Iterator[Module]:
        name, inner = self.name, self.intermediate
        yield Module(name, "mlp")
        yield Module(f"{name}.gate_proj", "linear", f"ffn_gate{self.gguf}", (inner, hidden))
        yield Module(f"{name}.up_proj", "linear", f"ffn_up{self.gguf}", (inner, hidden))
        yield Module(f"{name}.down_proj", "linear", f"ffn_down{self.gguf}", (hidden, inner))

    def vectors(self, hidden: int) -> Iterator[Vector]:
        return iter(())

    def row_values(self, hidden: int) -> int:
        return 2 * self.intermediate

    def expert_values(self, hidden: int) -> int:
        return 0

    def divided(self, step: int) -> Iterator[Divided]:
        yield Divided(self.size, self.intermediate, step)

    def of_rank(self, ranks: int) -> Dense:
        return replace(self, intermediate=self.intermediate // ranks)

    def numbers(self) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class SharedExpert:
    """An expert that takes every token, behind a sigmoid gate if it is `gated`."""

    mlp: Dense
    gated: bool = True

    TARGETS: ClassVar[tuple[str, ...]] = (
        *(f"mlp.shared_expert.{part}" for part in _PROJECTIONS),
        "mlp.shared_expert_gate",
    )
    UNGATED_TARGETS: ClassVar[tuple[str, ...]] = tuple(f"mlp.shared_experts.{part}" for part in _PROJECTIONS)

    @classmethod
    def of(cls, intermediate: int, *, gated: bool = True) -> SharedExpert:
        return cls(Dense(intermediate, "mlp.shared_expert", "_shexp", "shared_expert_intermediate_size"), gated)

    @classmethod
    def ungated(cls, count: int, width: int) -> SharedExpert:
        """`count` experts, each `width` values wide, that are stored as one."""
        size = "n_shared_experts x moe_intermediate_size"
        return cls(Dense(count * width, "mlp.shared_experts", "_shexp", size), gated=False)

    def modules(self, hidden: int) -> Iterator[Module]:
        yield from self.mlp.modules(hidden)
        if self.gated:
            yield Module("mlp.shared_expert_gate", "linear", "ffn_gate_inp_shexp", (1, hidden))


@dataclass(frozen=True)
class Sparse:
    """`experts` SwiGLU MLPs, `intermediate` values wide, of which a router chooses `top_k` for each token. `size`: how
    configurations call their width; `bias_name`: the tensor of a router's bias. `gate_bias`: of the router's logits;
    `expert_bias`: each projection of an expert has one. `interleaved`: safetensors hold the rows of gate and up by
    turns. `held`: those of the experts that are here, where each of several ranks has some; None: all."""

    experts: int
    top_k: int
    intermediate: int
    router: Router = Router()
    shared: SharedExpert | None = None
    size: str = "moe_intermediate_size"
    bias_name: str = "mlp.gate.e_score_correction_bias"
    activation: Activation = SILU
    gate_bias: bool = False
    expert_bias: bool = False
    interleaved: bool = False
    held: range | None = None

    TARGETS: ClassVar[tuple[str, ...]] = ("mlp.gate",)

    @property
    def plain(self) -> bool:
        """Whether experts are down(silu(gate(x)) * up(x)), without biases."""
        return self.activation == SILU and not self.expert_bias

    def modules(self, hidden: int) -> Iterator[Module]:
        yield Module("mlp", "moe_block")
        yield Module("mlp.gate", "linear", "ffn_gate_inp", (self.experts, hidden), self.gate_bias)
        yield Module("mlp.experts", "experts")
        if self.shared is not None:
            yield from self.shared.modules(hidden)

    def vectors(self, hidden: int) -> Iterator[Vector]:
        if self.router.bias:
            yield Vector(self.bias_name, "exp_probs_b.bias", (self.experts,))
        for name in ("gate", "up", "down") if self.expert_bias else ():
            width = hidden if name == "down" else self.intermediate
            yield Vector(f"mlp.experts.{name}_bias", f"ffn_{name}_exps.bias", (self.experts, width))

    def row_values(self, hidden: int) -> int:
        shared = 0 if self.shared is None else self.shared.mlp.row_values(hidden)
        return self.expert_values(hidden) + shared

    def expert_values(self, hidden: int) -> int:
        """Of `row_values` those inside the routed experts."""
        return 2 * self.top_k * (self.intermediate + hidden)

    def divided(self, step: int) -> Iterator[Divided]:
        yield Divided(self.size, self.intermediate, step)
        yield from self._divided_beside(step)

    def divided_whole(self, step: int) -> Iterator[Divided]:
        """As `divided`, where ranks have whole experts."""
        yield Divided("num_experts", self.experts)
        yield from self._divided_beside(step)

    def _divided_beside(self, step: int) -> Iterator[Divided]:
        if self.shared is not None:
            yield from self.shared.mlp.divided(step)

    def of_rank(self, ranks: int) -> Sparse:
        shared = None if self.shared is None else replace(self.shared, mlp=self.shared.mlp.of_rank(ranks))
        return replace(self, intermediate=self.intermediate // ranks, shared=shared)

    def numbers(self) -> dict[str, float]:
        shared = {} if self.shared is None else {"shared_expert_intermediate_size": self.shared.mlp.intermediate}
        return {
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.intermediate,
            **shared,
        }
