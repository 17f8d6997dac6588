"""Trainable experts whose weights a GPU gets layer by layer for large micro-batches; small ones stay on the CPU.

    forward    layer 0, 1, ... L - 1: while one is computed, the next one is copied
    backward   L - 1, ... 0: the one before it is

The two layers at either end are still there when the direction changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from engine.experts.gpu.compute import CHUNK_ROWS
from engine.experts.gpu.layout import Sizes
from engine.experts.streamed.layers import LayerStream
from training.experts.base import ExpertLora, TrainableExperts
from training.experts.streamed import layer as one_layer
from training.experts.streamed.layer import Choices, Lora, LoraGradients, Weights

_MATRICES = 6


class Streams:
    """What the layers of a model share. `order`: the layers of `stream`; `threshold`: rows of a micro-batch from which
    they are computed on the GPU."""

    def __init__(
        self,
        stream: LayerStream,
        order: Sequence[int],
        sizes: Sizes,
        dtype: torch.dtype,
        device: torch.device,
        threshold: int,
    ) -> None:
        self.stream, self.order, self.sizes, self.dtype, self.device = stream, tuple(order), sizes, dtype, device
        self.threshold = threshold
        self._last, self._step = 0, 1  # number of the layer before, and which way it went on from there

    def begin(self, layer: int, *, back: bool) -> Weights:
        """The layer's weights, for the current stream, until `end`; the one that comes next is on its way then."""
        self.stream.prepare()
        expert_slots = self.stream.take(layer)
        number = self.order.index(layer)
        if back or number < self._last:
            self._step = -1
        elif number > self._last:
            self._step = 1
        self._last = number
        following = number + self._step
        if not 0 <= following < len(self.order):  # turns round here
            following = number - self._step
        if 0 <= following < len(self.order):
            self.stream.fetch(self.order[following])
        return Weights.of(expert_slots, self.stream.layout(layer), self.sizes, self.dtype)

    def end(self, layer: int) -> None:
        self.stream.release(layer)


class StreamedTrainableExperts(TrainableExperts):
    """One layer. `inner` computes what has fewer rows than the threshold. `keep`: whether forward keeps gate and up of
    each choice for the backward pass, which otherwise computes them again. Micro-batches on the GPU are of the type
    that the weights are held in there: `streams.dtype`."""

    def __init__(self, inner: TrainableExperts, streams: Streams, layer: int, *, keep: bool = True) -> None:
        self.inner, self.streams, self.layer, self.keep = inner, streams, layer, keep
        self.num_experts, self.hidden_size = inner.num_experts, inner.hidden_size
        self.intermediate_size, self.lora_device = inner.intermediate_size, streams.device

    def device(self, rows: int) -> torch.device:
        return self.streams.device if rows >= self.streams.threshold else self.inner.device(rows)

    def forward(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        slots: torch.Tensor,
        loras: Mapping[int, ExpertLora],
    ) -> torch.Tensor:
        if len(hidden) < self.streams.threshold:
            return self.inner.forward(hidden, ids, weights, slots, loras)
        self.check(hidden, ids, weights, slots, loras)
        if hidden.dtype != self.streams.dtype:
            raise ValueError(f"hidden is {hidden.dtype}; these experts are streamed in {self.streams.dtype}")
        matrices = [m.to(self.streams.device) for slot in sorted(loras) for m in loras[slot].matrices()]
        adapters = [(slot, loras[slot].scaling) for slot in sorted(loras)]
        keep = self.keep and torch.is_grad_enabled()
        out: torch.Tensor = _Streamed.apply(self, keep, adapters, ids, slots, hidden, weights, *matrices)  # type: ignore[no-untyped-call]
        return out


class _Streamed(torch.autograd.Function):
    """Rows are computed a chunk at a time, which bounds the memory beside."""

    @staticmethod
    def forward(
        ctx: Any,
        experts: StreamedTrainableExperts,
        keep: bool,
        adapters: list[tuple[int, float]],
        ids: torch.Tensor,
        slots: torch.Tensor,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        *matrices: torch.Tensor,
    ) -> torch.Tensor:
        streams = experts.streams
        of_layer = streams.begin(experts.layer, back=False)
        loras = _loras(adapters, matrices, streams.dtype)
        out = torch.zeros_like(hidden)
        choices, kept = [], []
        for rows in _chunks(len(hidden)):
            choices.append(Choices.of(ids[rows], slots[rows], experts.num_experts))
            values, products = one_layer.forward(
                hidden[rows], weights[rows], choices[-1], of_layer, _present(loras, slots[rows])
            )
            out[rows] = values
            if keep:
                kept.append(products)
        streams.end(experts.layer)
        ctx.experts, ctx.adapters, ctx.slots, ctx.choices = experts, adapters, slots, choices
        ctx.save_for_backward(hidden, weights, *matrices, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        experts: StreamedTrainableExperts = ctx.experts
        streams, adapters = experts.streams, ctx.adapters
        hidden, weights, *rest = ctx.saved_tensors
        matrices, kept = rest[: _MATRICES * len(adapters)], rest[_MATRICES * len(adapters) :]
        of_layer = streams.begin(experts.layer, back=True)
        loras = _loras(adapters, matrices, streams.dtype)
        grad_out = grad_out.to(hidden.dtype)
        grad_hidden, grad_weights = torch.empty_like(hidden), torch.empty_like(weights)
        sums: dict[int, LoraGradients] = {}
        for number, rows in enumerate(_chunks(len(hidden))):
            present = _present(loras, ctx.slots[rows])
            grad_hidden[rows], grad_weights[rows], found = one_layer.backward(
                hidden[rows],
                weights[rows],
                grad_out[rows],
                ctx.choices[number],
                of_layer,
                present,
                kept[number] if kept else None,
            )
            for lora, gradients in zip(present, found, strict=True):
                if lora.slot in sums:
                    sums[lora.slot].add(gradients)
                else:
                    sums[lora.slot] = gradients
        streams.end(experts.layer)
        grads: list[torch.Tensor] = []
        for lora, first in zip(loras, range(0, len(matrices), _MATRICES), strict=True):
            if lora.slot in sums:
                grads += sums[lora.slot].matrices(lora.rank)
            else:
                grads += [torch.zeros_like(m) for m in matrices[first : first + _MATRICES]]
        needed = ctx.needs_input_grad[5:]
        every = (grad_hidden, grad_weights, *grads)
        return (None,) * 5 + tuple(grad if need else None for grad, need in zip(every, needed, strict=True))


def _chunks(rows: int) -> list[slice]:
    return [slice(first, min(first + CHUNK_ROWS, rows)) for first in range(0, rows, CHUNK_ROWS)]


def _loras(adapters: list[tuple[int, float]], matrices: Sequence[torch.Tensor], dtype: torch.dtype) -> list[Lora]:
    return [
        Lora.of(slot, scaling, matrices[_MATRICES * i : _MATRICES * (i + 1)], dtype)
        for i, (slot, scaling) in enumerate(adapters)
    ]


def _present(loras: Sequence[Lora], slots: torch.Tensor) -> list[Lora]:
    """Those that some row has."""
    here = set(slots.tolist())
    return [lora for lora in loras if lora.slot in here]
