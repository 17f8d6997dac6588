"""What the readers of all forms share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.architectures.config import ModelConfig
from engine.errors import AdapterError
from engine.lora.adapter import ExpertLora
from engine.lora.files.detect import PROJECTIONS
from engine.lora.files.folder import Entry, refusal
from engine.lora.files.settings import PEFT, Settings


@dataclass
class Reading:
    """One adapter being read. `warnings` goes into the result."""

    config: ModelConfig
    settings: Settings
    expert_scaling: str | None
    expert_b_layout: str | None
    max_rank: int | None
    warnings: list[str]

    @property
    def linear_scaling(self) -> str:
        return "alpha/sqrt(r)" if self.settings.rslora else "alpha/r"

    @property
    def by_turns(self) -> bool:
        """Whether transformers holds the rows of an expert's gate and up by turns, inputs before outputs."""
        return self.config.experts is not None and self.config.experts.interleaved

    def check_rank(self, rank: int, keys: list[str]) -> None:
        if self.max_rank is not None and rank > self.max_rank:
            raise refusal(f"rank {rank} is over --max-adapter-rank {self.max_rank}", keys)

    def expert_sizes(self, projection: str) -> tuple[int, int]:
        """(in, out) of an expert's projection."""
        hidden, intermediate = self.config.hidden_size, self.config.moe_intermediate_size
        return (intermediate, hidden) if projection == "down" else (hidden, intermediate)


@dataclass(frozen=True)
class Stack:
    """One projection of all experts: a [E, r, in], b [E, out, r]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[1]


def check_pair(a: Entry, b: Entry, size_in: int, size_out: int) -> int:
    """The rank of a [r, in], b [out, r]; AdapterError if they do not fit each other or the base."""
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or a.shape[0] == 0:
        raise refusal(f"shapes {list(a.shape)} and {list(b.shape)} are no LoRA pair [r, in], [out, r]", [a.key, b.key])
    if (a.shape[1], b.shape[0]) != (size_in, size_out):
        raise refusal(
            f"shapes {list(a.shape)} and {list(b.shape)} do not fit the base: in {size_in}, out {size_out}",
            [a.key, b.key],
        )
    return a.shape[0]


def split_gate_up(
    a: torch.Tensor, b: torch.Tensor, scale: float, *, by_turns: bool = False
) -> tuple[Stack, Stack]:  # fmt: skip
    """a [E, r, H], b [E, 2I, r] -> gate, up. A saved block-diagonal b (gate's columns, then up's) halves the rank.
    `by_turns`: b's even rows are gate's."""
    intermediate, half = b.shape[1] // 2, b.shape[2] // 2
    gate_b, up_b = (b[:, ::2], b[:, 1::2]) if by_turns else (b[:, :intermediate], b[:, intermediate:])
    crossed = gate_b[:, :, half:].any() or up_b[:, :, :half].any()
    if b.shape[2] % 2 == 0 and not crossed and bool(b.any()):
        return Stack(a[:, :half], gate_b[:, :, :half], scale), Stack(a[:, half:], up_b[:, :, half:], scale)
    return Stack(a, gate_b, scale), Stack(a, up_b, scale)


def refuse_by_turns(reading: Reading, keys: list[str]) -> None:
    """LoRA on gate and up in one, where their rows lie by turns: trainers other than PEFT differ in the order they
    mean. PEFT's is that of transformers' parameter."""
    if keys and reading.by_turns:
        message = "LoRA on whole parameters of experts whose gate and up lie by turns, not PEFT's"
        raise refusal(f"{message}; PEFT's own, and that of single experts, can be read", keys)


def assemble(reading: Reading, stacks: dict[str, Stack]) -> ExpertLora:
    """One layer, from the projections that are there: absent ones become zero, shorter ranks are padded."""
    rank = max(stack.rank for stack in stacks.values())
    dtype = next(iter(stacks.values())).a.dtype
    padded: list[Stack] = []
    for projection in PROJECTIONS:
        stack = stacks.get(projection) or _zeros(reading, projection, rank, dtype)
        a = F.pad(stack.a, (0, 0, 0, rank - stack.rank)).contiguous()
        b = F.pad(stack.b, (0, rank - stack.rank)).contiguous()
        padded.append(Stack(a, b, stack.scale))
    gate, up, down = padded
    return ExpertLora(gate.a, gate.b, up.a, up.b, down.a, down.b, gate.scale, up.scale, down.scale)


def missing(layers: list[int]) -> str:
    """ "layers 0, 2" for a warning."""
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"


def require_rank(actual: int, expected: int, where: str, keys: list[str]) -> None:
    if actual != expected:
        raise refusal(f"rank {actual} of the tensors disagrees with rank {expected} of {where}", keys)


def expert_module(layer: int, expert: int, projection: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"


def open_expert_scaling(settings: Settings, layers: Mapping[int, Mapping[int, Iterable[str]]]) -> list[str]:
    """Settings that leave open how experts under per-expert keys (projections by layer and expert) were scaled: PEFT
    honours them in training, KT's trainer does not, and the keys look the same."""
    modules = (expert_module(layer, e, p) for layer, experts in layers.items() for e, ps in experts.items() for p in ps)
    open_by = ["use_rslora"] if settings.rslora else []
    if any(alpha != settings.alpha for alpha in settings.alpha_pattern.values()):
        open_by += ["alpha_pattern"] * any(settings.of(module)[1] != settings.alpha for module in modules)
    return open_by


def expert_scaling_of_peft_keys(reading: Reading, layers: Mapping[int, Mapping[int, Iterable[str]]]) -> str:
    """One of EXPERT_SCALINGS; AdapterError if the files leave it open and the call does not say."""
    open_by = open_expert_scaling(reading.settings, layers)
    if not open_by:
        return PEFT
    if reading.expert_scaling is None:
        raise AdapterError(
            f"{' and '.join(open_by)} set and experts stored under per-expert keys: the files do not tell whether the "
            "trainer scaled experts by it; give expert_scaling: 'alpha/r' or 'alpha/sqrt(r)' of lora_alpha, or 'peft' "
            "for what these settings say",
            open_by,
        )
    return reading.expert_scaling


def _zeros(reading: Reading, projection: str, rank: int, dtype: torch.dtype) -> Stack:
    size_in, size_out = reading.expert_sizes(projection)
    experts = reading.config.num_experts
    return Stack(torch.zeros(experts, rank, size_in, dtype=dtype), torch.zeros(experts, size_out, rank, dtype=dtype), 1)
