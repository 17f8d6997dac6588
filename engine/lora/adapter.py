"""An adapter in the one form that the engine computes with, whatever files it came from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from engine.architectures.parts.mlp import FLOAT32_MODULES

RANK_STEP = 16  # of padded ranks on a GPU: the least that its matrix units multiply
_PANEL = 16  # rows of A, padded
_F32 = 4


@dataclass(frozen=True)
class LoraPair:
    """y += scale * (x A^T) B^T. a [r, in], b [out, r], in the dtype they were stored in."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True)
class ExpertLora:
    """One layer's expert LoRA for all E experts at one rank r (shorter ranks padded with zeros, absent ones zero).

    gate_a, up_a [E, r, H]; gate_b, up_b [E, I, r]; down_a [E, r, I]; down_b [E, H, r]; contiguous.
    `*_scale` multiplies the product; where experts differ in scale it is folded into b (float32) and is 1.
    """

    gate_a: torch.Tensor
    gate_b: torch.Tensor
    up_a: torch.Tensor
    up_b: torch.Tensor
    down_a: torch.Tensor
    down_b: torch.Tensor
    gate_scale: float
    up_scale: float
    down_scale: float

    @property
    def rank(self) -> int:
        return self.gate_a.shape[1]

    @property
    def num_bytes(self) -> int:
        tensors = (self.gate_a, self.gate_b, self.up_a, self.up_b, self.down_a, self.down_b)
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def values_per_rank(self) -> int:
        experts, inner = self.gate_b.shape[:2]
        return 3 * experts * (self.gate_a.shape[2] + inner)

    def copy(self) -> ExpertLora:
        names = ("gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")
        return replace(self, **{name: getattr(self, name).clone() for name in names})

    def slot_bytes(self, element_bytes: int) -> int:
        """Packed: rows of A in panels of 16, gate's and up's together."""
        experts, rank, hidden = self.gate_a.shape
        inner = self.down_a.shape[2]
        values = _round(2 * rank) * hidden + _round(rank) * inner + rank * (2 * inner + hidden)
        return element_bytes * experts * values


@dataclass(frozen=True)
class ExtraMlp:
    """A dense SwiGLU MLP that an adapter adds beside the experts: gate, up [J, H], down [H, J]."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


@dataclass
class AdapterWeights:
    """Everything of one adapter. `linears` maps a module's name ("model.layers.0.self_attn.q_proj",
    "model.layers.0.mlp.gate", "model.layers.0.mlp.up_proj" of a dense layer) to its pair."""

    name: str
    format: str  # "kt-fused", "kt-fused-no-manifest", "peft-per-expert", "peft-fused-3d", "peft-attention", ...
    linears: dict[str, LoraPair] = field(default_factory=dict)
    experts: dict[int, ExpertLora] = field(default_factory=dict)  # by layer
    extra_mlps: dict[int, list[ExtraMlp]] = field(default_factory=dict)  # by layer; their mean is added
    warnings: list[str] = field(default_factory=list)
    path: str = ""
    digest: bytes = b""  # of all that it computes with; equal for equal adapters (`engine.lora.sealed_memory`)

    @property
    def rank(self) -> int:
        """The largest rank of any part."""
        ranks = [pair.rank for pair in self.linears.values()] + [layer.rank for layer in self.experts.values()]
        return max(ranks, default=0)

    @property
    def num_bytes(self) -> int:
        linears = sum(t.numel() * t.element_size() for p in self.linears.values() for t in (p.a, p.b))
        extra = sum(
            t.numel() * t.element_size() for ms in self.extra_mlps.values() for m in ms for t in (m.gate, m.up, m.down)
        )
        return linears + extra + sum(e.num_bytes for e in self.experts.values())

    def slot_bytes(self, element_bytes: int) -> int:
        """Of a slot's copy, packed as the native kernels read it; routers and extra MLPs may be float32."""
        linears = 0
        for name, pair in self.linears.items():
            values = _round(pair.rank) * pair.a.shape[1] + _round(pair.b.shape[0]) * pair.rank
            linears += values * (_F32 if name.endswith(FLOAT32_MODULES) else element_bytes)
        extra = sum(t.numel() for ms in self.extra_mlps.values() for m in ms for t in (m.gate, m.up, m.down))
        return linears + _F32 * extra + sum(e.slot_bytes(element_bytes) for e in self.experts.values())

    def gpu_bytes(self, element_bytes: int) -> int:
        """Of the experts' part in a slot of a GPU: one rank in all layers."""
        rank = padded_rank(max((layer.rank for layer in self.experts.values()), default=1))
        return element_bytes * rank * sum(layer.values_per_rank for layer in self.experts.values())


def padded_rank(rank: int) -> int:
    """What a rank >= 1 is padded to on a GPU: a power of two, as Triton's blocks are, and so a multiple of
    RANK_STEP."""
    return max(RANK_STEP, 1 << (rank - 1).bit_length())


def _round(size: int) -> int:
    return -(-size // _PANEL) * _PANEL
