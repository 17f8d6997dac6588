"""The contract between the model that is trained and what computes its routed experts.

T rows, each with k experts of E; hidden size H, the experts' intermediate size I; adapters by slot, ranks of their own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class ExpertLora(nn.Module):
    """One layer's expert LoRA of one adapter: float32 master parameters, which no computation rounds in place.

    gate_lora_a, up_lora_a [E, r, H]; gate_lora_b, up_lora_b [E, I, r]; down_lora_a [E, r, I]; down_lora_b [E, H, r].
    A is drawn as PEFT draws each expert's [r, in] (kaiming_uniform with a = sqrt 5), B is zero; `scaling` multiplies
    B A x. `generator`: torch's own without one. ValueError for a rank below 1.
    """

    gate_lora_a: nn.Parameter
    gate_lora_b: nn.Parameter
    up_lora_a: nn.Parameter
    up_lora_b: nn.Parameter
    down_lora_a: nn.Parameter
    down_lora_b: nn.Parameter

    def __init__(
        self,
        experts: int,
        rank: int,
        hidden: int,
        intermediate: int,
        scaling: float,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"rank: {rank}; at least 1")
        self.scaling = scaling
        self.chosen: torch.Tensor | None = None  # bool [E]: experts with rows since it was cleared; None: not recorded
        sizes = {"gate": (hidden, intermediate), "up": (hidden, intermediate), "down": (intermediate, hidden)}
        for name, (size_in, size_out) in sizes.items():
            bound = 1 / math.sqrt(size_in)
            a = torch.empty(experts, rank, size_in, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
            b = torch.zeros(experts, size_out, rank, dtype=torch.float32)
            self.register_parameter(f"{name}_lora_a", nn.Parameter(a))
            self.register_parameter(f"{name}_lora_b", nn.Parameter(b))

    @property
    def rank(self) -> int:
        return int(self.gate_lora_a.shape[1])

    def matrices(self) -> tuple[nn.Parameter, ...]:
        """A of gate, up, down, then B of gate, up, down."""
        a = (self.gate_lora_a, self.up_lora_a, self.down_lora_a)
        return (*a, self.gate_lora_b, self.up_lora_b, self.down_lora_b)

    def note(self, ids: torch.Tensor) -> None:
        """Rows go through experts `ids`, of any shape, -1: none."""
        if self.chosen is not None:
            self.chosen[ids[ids >= 0].cpu()] = True

    def place(self, device: torch.device) -> None:
        for parameter in self.parameters():
            if not parameter.is_meta:  # values are still to be read
                parameter.data = parameter.data.to(device)

    def _apply(self, fn: Any, recurse: bool = True) -> ExpertLora:
        """The matrices stay where `place` has put them, and float32: trainers send whole models to one device."""
        return self


class TrainableExperts(ABC):
    """One layer's frozen experts. `lora_device`: where their LoRA is best kept; wherever it is, `forward` takes it."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    lora_device = torch.device("cpu")

    def device(self, rows: int) -> torch.device:
        """Where `forward` takes the tensors of a batch of so many rows."""
        return torch.device("cpu")

    @abstractmethod
    def forward(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        slots: torch.Tensor,
        loras: Mapping[int, ExpertLora],
    ) -> torch.Tensor:
        """sum_j weights_j expert_{ids_j}(hidden), each row with the LoRA of its slot inside the experts.

        hidden [T, H] float32 or bfloat16; ids [T, k] int64, -1: skipped; weights [T, k] float32, all on `device(T)`;
        slots [T] int32 on the CPU, 0: no LoRA. Returns [T, H] in hidden's type, differentiable in `hidden`, `weights`
        and the matrices of `loras` (a matrix of an expert that no row of its slot has chosen gets zeros). A row whose
        ids are all -1 gives zeros and is not looked at. ValueError for an id out of range, a slot that `loras` lacks,
        or shapes and types that differ from these.
        """

    def check(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        slots: torch.Tensor,
        loras: Mapping[int, ExpertLora],
    ) -> None:
        """What every implementation asks of the tensors of `forward`."""
        rows, top_k = hidden.shape[0], ids.shape[-1]
        if hidden.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"hidden is {hidden.dtype}; allowed are float32 and bfloat16")
        expected = {
            "hidden": (hidden, (rows, self.hidden_size), hidden.dtype),
            "ids": (ids, (rows, top_k), torch.int64),
            "weights": (weights, (rows, top_k), torch.float32),
            "slots": (slots, (rows,), torch.int32),
        }
        for name, (tensor, shape, dtype) in expected.items():
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; needed is {dtype} {shape}")
        if rows and not -1 <= int(ids.min()) <= int(ids.max()) < self.num_experts:
            raise ValueError(f"ids: {int(ids.min())} to {int(ids.max())}; allowed are -1 to {self.num_experts - 1}")
        if missing := set(slots.tolist()) - {0, *loras}:
            raise ValueError(f"slots: {min(missing)} has no LoRA; allowed are 0 and {sorted(loras)}")
        for slot, lora in loras.items():
            self.check_lora(slot, lora)

    def check_lora(self, slot: int, lora: ExpertLora) -> None:
        """ValueError if it does not fit these experts."""
        if not 1 <= slot <= 65535:
            raise ValueError(f"slot: {slot}; allowed for a LoRA are 1 to 65535")
        e, r, h, i = self.num_experts, lora.rank, self.hidden_size, self.intermediate_size
        shapes = ((e, r, h), (e, r, h), (e, r, i), (e, i, r), (e, i, r), (e, h, r))
        for matrix, shape in zip(lora.matrices(), shapes, strict=True):
            if tuple(matrix.shape) != shape or matrix.dtype != torch.float32:
                raise ValueError(
                    f"slot {slot}: a LoRA matrix is {matrix.dtype} {tuple(matrix.shape)}; needed is float32 {shape}"
                )
