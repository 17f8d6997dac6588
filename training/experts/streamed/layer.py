"""One layer's experts with LoRA inside, forward and backward, over weights that are plain numbers on any device.

    n      (row, expert) choices, sorted by expert, then adapter slot, then row
    kept   gate and up of each, [n, 2 I]: all that backward needs beside the inputs. Otherwise it computes them again

Products are of the weights' type with float32 sums, gradients of LoRA float32. A row's choices are added up in their
order, so results do not change from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.experts.gpu.index import Index, build
from engine.experts.gpu.layout import ExpertLayout, Sizes
from engine.lora.adapter import padded_rank
from training.experts.streamed.products import multiply, outer

_BLOCK_ROWS = 16  # of the index's blocks, which nothing here reads


@dataclass(frozen=True)
class Weights:
    """gate_up [E, 2 I, H], down [E, H, I]."""

    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def of(cls, expert_slots: torch.Tensor, layout: ExpertLayout, sizes: Sizes, dtype: torch.dtype) -> Weights:
        """Of plain expert slots, uint8 [E, >= layout.num_bytes]."""
        values = expert_slots[:, : layout.num_bytes].view(dtype)
        both = 2 * sizes.inner * sizes.hidden
        return cls(
            values[:, :both].view(-1, 2 * sizes.inner, sizes.hidden),
            values[:, both:].view(-1, sizes.hidden, sizes.inner),
        )


@dataclass(frozen=True)
class Choices:
    """What is computed of a batch. `order` int64 [n]: row k + place among the row's choices; `start` int32 [E + 1]:
    of each expert's; `slots` [n]: of their adapters, None if all rows have the same."""

    order: torch.Tensor
    start: torch.Tensor
    top_k: int
    slots: torch.Tensor | None

    @classmethod
    def of(cls, ids: torch.Tensor, slots: torch.Tensor, experts: int) -> Choices:
        """ids int64 [T, k], -1: skipped; slots int32 [T], on the CPU."""
        rows, top_k = ids.shape
        device, least, most = ids.device, *map(int, slots.aminmax())
        here = slots.to(device)
        index = Index.allocate(rows, top_k, experts, _BLOCK_ROWS, device)
        place = torch.zeros(most + 1, experts, dtype=torch.int32, device=device)
        build(index, torch.full((1,), rows, device=device), ids, here, place, _BLOCK_ROWS)
        order = index.order[: int(index.start[-1])].long()
        return cls(order, index.start, top_k, None if least == most else here[order // top_k])

    @property
    def rows(self) -> torch.Tensor:
        return self.order // self.top_k

    def of_slot(self, slot: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(places [m] among the choices, None for all; their own `start`) of an adapter's rows, of which there are."""
        if self.slots is None:
            return None, self.start
        mine = self.slots == slot
        before = F.pad(mine.cumsum(0), (1, 0))
        return mine.nonzero().flatten(), before[self.start.long()].to(torch.int32)

    def summed(self, values: torch.Tensor, weights: torch.Tensor | None, rows: int) -> torch.Tensor:
        """float32 [T, H]: of each row the sum of its choices' values [n, H], times weights [T, k]."""
        out = torch.zeros(rows, values.shape[1], dtype=torch.float32, device=values.device)
        if not len(values):
            return out
        places = torch.full((rows * self.top_k,), -1, device=values.device)
        places[self.order] = torch.arange(len(self.order), device=values.device)
        places = places.view(rows, self.top_k)
        for j in range(self.top_k):
            part = values[places[:, j].clamp(min=0)].float()
            if weights is not None:
                part *= weights[:, j, None]
            out += part.masked_fill_(places[:, j, None] < 0, 0)
        return out


@dataclass(frozen=True)
class Lora:
    """One adapter's matrices in the products' type, the rank padded with zeros to R: inputs [E, 2 R, H] (A of gate and
    up), gate_b and up_b [E, I, R], down_a [E, R, I], down_b [E, H, R]."""

    slot: int
    scaling: float
    rank: int
    inputs: torch.Tensor
    gate_b: torch.Tensor
    up_b: torch.Tensor
    down_a: torch.Tensor
    down_b: torch.Tensor

    @classmethod
    def of(cls, slot: int, scaling: float, matrices: Sequence[torch.Tensor], dtype: torch.dtype) -> Lora:
        """`matrices`: as ExpertLora.matrices() has them."""
        rank = matrices[0].shape[1]
        more = padded_rank(rank) - rank
        rows = [F.pad(a.to(dtype), (0, 0, 0, more)) for a in matrices[:3]]
        columns = [F.pad(b.to(dtype), (0, more)) for b in matrices[3:]]
        gate_b, up_b, down_b = (b.contiguous() for b in columns)
        return cls(slot, scaling, rank, torch.cat(rows[:2], 1), gate_b, up_b, rows[2].contiguous(), down_b)


@dataclass
class LoraGradients:
    """Sums of one adapter, float32, in the shapes of `Lora`."""

    inputs: torch.Tensor
    gate_b: torch.Tensor
    up_b: torch.Tensor
    down_a: torch.Tensor
    down_b: torch.Tensor

    def add(self, other: LoraGradients) -> None:
        for name, value in vars(other).items():
            getattr(self, name).add_(value)

    def matrices(self, rank: int) -> list[torch.Tensor]:
        """As ExpertLora.matrices() has them."""
        padded = self.down_a.shape[1]
        a = [self.inputs[:, :rank], self.inputs[:, padded : padded + rank], self.down_a[:, :rank]]
        return a + [b[..., :rank] for b in (self.gate_b, self.up_b, self.down_b)]


def forward(
    x: torch.Tensor, routing: torch.Tensor, choices: Choices, weights: Weights, loras: Sequence[Lora]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out float32 [T, H], what may be kept). x [T, H], routing float32 [T, k]."""
    kept = gate_and_up(x[choices.rows], choices, weights, loras)
    h = _gated(kept)
    y = multiply(h, weights.down.mT, choices.start)
    for lora in loras:
        mine, start = choices.of_slot(lora.slot)
        delta = multiply(multiply(_part(h, mine), lora.down_a.mT, start), lora.down_b.mT, start)
        _add(y, delta, mine, lora.scaling)
    return choices.summed(y, routing, len(x)), kept


def gate_and_up(xs: torch.Tensor, choices: Choices, weights: Weights, loras: Sequence[Lora]) -> torch.Tensor:
    """[n, 2 I] of the choices' rows xs [n, H]."""
    out = multiply(xs, weights.gate_up.mT, choices.start)
    gate, up = out.chunk(2, 1)
    for lora in loras:
        mine, start = choices.of_slot(lora.slot)
        t_gate, t_up = multiply(_part(xs, mine), lora.inputs.mT, start).chunk(2, 1)
        _add(gate, multiply(t_gate, lora.gate_b.mT, start), mine, lora.scaling)
        _add(up, multiply(t_up, lora.up_b.mT, start), mine, lora.scaling)
    return out


def backward(
    x: torch.Tensor,
    routing: torch.Tensor,
    grad_out: torch.Tensor,
    choices: Choices,
    weights: Weights,
    loras: Sequence[Lora],
    kept: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, list[LoraGradients]]:
    """(gradients of x, float32 [T, H]; of routing [T, k]; of each LoRA). `kept`: what forward gave, or None."""
    dtype, start, rows = x.dtype, choices.start, choices.rows
    xs, dy = x[rows], grad_out[rows]
    if kept is None:
        kept = gate_and_up(xs, choices, weights, loras)
    # Through down, without the routing weight, whose gradient is <dh, h>
    dh = multiply(dy, weights.down, start)
    for lora in loras:
        mine, own = choices.of_slot(lora.slot)
        t = multiply(_part(dy, mine), lora.down_b, own)
        _add(dh, multiply(t, lora.down_a, own), mine, lora.scaling)
    h = _gated(kept)
    grad_routing = torch.zeros(routing.numel(), dtype=torch.float32, device=x.device)
    grad_routing[choices.order] = (dh.float() * h.float()).sum(1)
    weight = routing.flatten()[choices.order][:, None]
    gradients = [_down_gradients(choices, lora, h, dy, weight) for lora in loras]
    del dy, h
    # Through silu(gate) up
    d_gate_up = torch.empty_like(kept)
    gate, up = kept.float().chunk(2, 1)
    sigmoid = torch.sigmoid(gate)
    dh = dh.float() * weight
    d_gate_up[:, : gate.shape[1]] = dh * up * sigmoid * (1 + gate * (1 - sigmoid))
    d_gate_up[:, gate.shape[1] :] = dh * gate * sigmoid
    del gate, up, sigmoid, dh
    dx = multiply(d_gate_up, weights.gate_up, start)
    found = []
    for lora, (down_a, down_b) in zip(loras, gradients, strict=True):
        mine, own = choices.of_slot(lora.slot)
        d_gate, d_up = _part(d_gate_up, mine).chunk(2, 1)
        dt = torch.cat([multiply(d_gate, lora.gate_b, own), multiply(d_up, lora.up_b, own)], 1)
        _add(dx, multiply(dt, lora.inputs, own), mine, lora.scaling)
        inputs = _part(xs, mine)
        t_gate, t_up = multiply(inputs, lora.inputs.mT, own).chunk(2, 1)
        s = lora.scaling
        found.append(
            LoraGradients(
                outer(dt, inputs, own, s), outer(d_gate, t_gate, own, s), outer(d_up, t_up, own, s), down_a, down_b
            )
        )
    return choices.summed(dx, None, len(x)).to(dtype), grad_routing.view_as(routing), found


def _down_gradients(
    choices: Choices, lora: Lora, h: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of down's A and B."""
    mine, start = choices.of_slot(lora.slot)
    h, dy, weight = (_part(each, mine) for each in (h, dy, weight))
    t = multiply(dy, lora.down_b, start)
    down_a = outer((t * weight).to(h.dtype), h, start, lora.scaling)
    t = multiply(h, lora.down_a.mT, start)
    return down_a, outer(dy, (t * weight).to(h.dtype), start, lora.scaling)


def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) up, [n, I] in the same type."""
    gate, up = gate_up.float().chunk(2, 1)
    return F.silu(gate).mul_(up).to(gate_up.dtype)


def _part(values: torch.Tensor, mine: torch.Tensor | None) -> torch.Tensor:
    return values if mine is None else values[mine]


def _add(out: torch.Tensor, delta: torch.Tensor, mine: torch.Tensor | None, scaling: float) -> None:
    """To the rows `mine`, each of which is there once."""
    if mine is None:
        out.add_(delta, alpha=scaling)
    else:
        out.index_add_(0, mine, delta, alpha=scaling)
