"""Adapters of steps of few rows, beside the products: launches, and what they need of scratch memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from engine.device import beside, rejoin
from engine.experts.base import ExpertBuffers
from engine.experts.gpu.layout import Elementwise, Sizes
from engine.lora.adapter import RANK_STEP

_COLUMNS = 256  # of gate and up, that a program activates
_COMBINED = 512  # values of a row's choices, that a program adds up
_MOST_STEP = 1024  # values of K that a program loads at once of each row of A


def shares(sizes: Sizes) -> int:
    """Into how many sums t of down is divided."""
    return -(-sizes.inner // _COLUMNS)


@dataclass(frozen=True)
class FewLora:
    """A layer's adapters in one step. t float32 [N, 2 R], t_down float32 [N, shares, R]; address int64 [slots, E],
    ranks int32 [slots], scales float32 [slots, 3]."""

    sizes: Sizes
    b: ExpertBuffers
    t: torch.Tensor
    t_down: torch.Tensor
    address: torch.Tensor
    ranks: torch.Tensor
    scales: torch.Tensor

    @contextmanager
    def narrowed(self) -> Iterator[None]:
        """t of gate and up is made beside what is launched within."""
        from engine.experts.gpu.lora_kernels import lora_a_choices

        step = next(step for step in (_MOST_STEP, 512, 256, 128, 64, 32) if self.sizes.hidden % step == 0)
        with beside(self.t.device):
            lora_a_choices[(self.b.ids.numel(), self.t.shape[1] // RANK_STEP)](
                self.b.hidden, self.t, *self._choices, self.scales, H=self.sizes.hidden, K=self.sizes.top_k,
                E=self.sizes.experts, T=self.t.shape[1], BK=step, ROWS=RANK_STEP, num_warps=4,
            )  # fmt: skip
        yield
        rejoin(self.t.device)

    def activate(self, raw: torch.Tensor, h: torch.Tensor, elementwise: Elementwise) -> None:
        """raw float32 [N, 2 I], of gate and up -> h [N, I], and t of down."""
        from engine.experts.gpu import lora_kernels

        lora_kernels.activate[(self.b.ids.numel(), shares(self.sizes))](
            raw, h, self.t, self.t_down, *self._choices, self.scales, K=self.sizes.top_k, **self.constants,
            **elementwise.constants, BN=_COLUMNS, num_warps=4,
        )  # fmt: skip

    def combine(self, h: torch.Tensor, y: torch.Tensor, place: torch.Tensor) -> None:
        """out = the sum of a row's y [N, H] and what adapters add to them."""
        from engine.experts.gpu.lora_kernels import combine_lora

        b, together = self.b, 1 << (self.sizes.top_k - 1).bit_length()
        columns = max(_COMBINED // together, 8)
        combine_lora[(b.max_rows, -(-self.sizes.hidden // columns))](
            b.bsz, b.ids, b.slots, place, h, y, self.t_down, b.weights, self.address, self.ranks, b.out,
            K=self.sizes.top_k, **self.constants, J=together, BN=columns, num_warps=4,
        )  # fmt: skip

    @property
    def constants(self) -> dict[str, Any]:
        """Of kernels that read t of down."""
        sizes = self.sizes
        return {
            "H": sizes.hidden, "MID": sizes.inner, "E": sizes.experts, "T": self.t.shape[1], "SHARES": shares(sizes),
            "R": RANK_STEP,
        }  # fmt: skip

    @property
    def _choices(self) -> tuple[torch.Tensor, ...]:
        return self.b.bsz, self.b.ids, self.b.slots, self.address, self.ranks
