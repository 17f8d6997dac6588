"""Trainable experts on our own CPU kernels: forward and backward on the packed weights that serving reads."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from engine.architectures.config import ModelConfig
from engine.experts.base import ExpertBackend
from engine.experts.capabilities import NativeKernels, PackedWeights, needed
from training.experts.base import ExpertLora, TrainableExperts

if TYPE_CHECKING:
    from native import _native

_MATRICES = 6


class NativeTrainableExperts(TrainableExperts):
    """One layer's packed experts. Products are bfloat16 with float32 sums, or float32 over float32 weights; quantised
    weights are what they are in serving, and are dequantised to bfloat16, some panels at a time, for the backward pass.

    `trainer` is shared by the layers of a model, with its scratch memory. `keep`: whether forward keeps gate and up of
    each choice, and A x of LoRA (4 k (I + r) bytes a row in bfloat16), for the backward pass, which otherwise computes
    them again. `locked`:
    what forward and backward make is page-locked memory, which torch keeps for the next step and a GPU copies faster.
    Not for several threads at once on one `trainer`: they wait for each other.
    """

    def __init__(
        self,
        layer: _native.ExpertLayer,
        trainer: _native.ExpertTrainer,
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        keep: bool = True,
        locked: bool = False,
    ) -> None:
        self.layer, self.trainer, self.keep, self.locked = layer, trainer, keep, locked
        self.num_experts, self.hidden_size, self.intermediate_size = num_experts, hidden_size, intermediate_size

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self.locked)

    def forward(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        slots: torch.Tensor,
        loras: Mapping[int, ExpertLora],
    ) -> torch.Tensor:
        self.check(hidden, ids, weights, slots, loras)
        matrices = [matrix.cpu() for slot in sorted(loras) for matrix in loras[slot].matrices()]
        adapters = [(slot, loras[slot].rank, loras[slot].scaling) for slot in sorted(loras)]
        keep = self.keep and torch.is_grad_enabled()
        out: torch.Tensor = _Experts.apply(self, keep, adapters, ids, slots, hidden, weights, *matrices)  # type: ignore[no-untyped-call]
        return out


def trainable_layers(
    experts: ExpertBackend, config: ModelConfig, *, keep: bool = True, locked: bool = False
) -> dict[int, NativeTrainableExperts]:
    """Every layer that `experts` hold for a model, over one trainer on their pool. ExpertBackendError for experts
    without packed weights."""
    native: Any = importlib.import_module("native._native")
    packed, kernels = needed(experts, PackedWeights), needed(experts, NativeKernels)
    trainer: _native.ExpertTrainer = native.ExpertTrainer(kernels.pool, kernels.isa)
    return {
        index: NativeTrainableExperts(
            layer,
            trainer,
            num_experts=config.num_experts,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            keep=keep,
            locked=locked,
        )
        for index, layer in packed.layers.items()
    }


class _Experts(torch.autograd.Function):
    """Tensors cross as addresses; whatever memory the kernels read stays alive in this frame or in `ctx`."""

    @staticmethod
    def forward(
        ctx: Any,
        experts: NativeTrainableExperts,
        keep: bool,
        adapters: list[tuple[int, int, float]],
        ids: torch.Tensor,
        slots: torch.Tensor,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        *matrices: torch.Tensor,
    ) -> torch.Tensor:
        tensors = [t.detach().contiguous() for t in (hidden, weights, ids, slots, *matrices)]
        rows, top_k = ids.shape
        out = experts.empty(hidden.shape, hidden.dtype)
        kept = (
            experts.empty(kept_shape(rows * top_k, experts.intermediate_size, adapters), hidden.dtype) if keep else None
        )
        batch, loras = train_batch(*tensors[:4]), train_loras(adapters, tensors[4:], [None] * len(matrices))
        experts.trainer.forward(experts.layer, loras, batch, out=out.data_ptr(), kept=_address(kept))
        ctx.experts, ctx.adapters = experts, adapters
        ctx.save_for_backward(hidden, weights, ids, slots, kept, *matrices)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        experts: NativeTrainableExperts = ctx.experts
        hidden, weights, ids, slots, kept, *matrices = ctx.saved_tensors
        hidden, weights, ids, slots, *matrices = (t.contiguous() for t in (hidden, weights, ids, slots, *matrices))
        wanted = ctx.needs_input_grad[-len(matrices) - 2 :] if matrices else ctx.needs_input_grad[-2:]
        grad_out = grad_out.to(hidden.dtype).contiguous()
        grad_hidden = experts.empty(hidden.shape, hidden.dtype) if wanted[0] else None
        grad_weights = experts.empty(weights.shape, weights.dtype)
        grads = [
            experts.empty(m.shape, m.dtype) if need else None for m, need in zip(matrices, wanted[2:], strict=True)
        ]
        batch = train_batch(hidden, weights, ids, slots)
        experts.trainer.backward(
            experts.layer,
            train_loras(ctx.adapters, matrices, grads),
            batch,
            kept=_address(kept),
            grad_out=grad_out.data_ptr(),
            grad_hidden=_address(grad_hidden),
            grad_weights=grad_weights.data_ptr(),
        )
        return (None, None, None, None, None, grad_hidden, grad_weights if wanted[1] else None, *grads)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def kept_shape(choices: int, intermediate: int, adapters: Sequence[tuple[int, int, float]]) -> tuple[int, int]:
    """Of what forward keeps for the backward pass. `adapters`: slot, rank and scaling of each."""
    return choices, 2 * (intermediate + max((rank for _, rank, _ in adapters), default=0))


def train_batch(
    hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, slots: torch.Tensor
) -> _native.TrainBatch:
    from native import _native

    return _native.TrainBatch(
        ids=ids.data_ptr(),
        weights=weights.data_ptr(),
        slots=slots.data_ptr(),
        hidden=hidden.data_ptr(),
        rows=ids.shape[0],
        top_k=ids.shape[1],
        bf16=hidden.dtype == torch.bfloat16,
    )


def train_loras(
    adapters: list[tuple[int, int, float]], matrices: list[torch.Tensor], grads: list[torch.Tensor | None]
) -> list[_native.TrainLora]:
    """`matrices` and `grads`: of each adapter A of gate, up, down, then B."""
    from native import _native

    loras = []
    for i, (slot, rank, scale) in enumerate(adapters):
        values = [_address(m) for m in matrices[_MATRICES * i : _MATRICES * (i + 1)]]
        sums = [_address(g) for g in grads[_MATRICES * i : _MATRICES * (i + 1)]]
        loras.append(_native.TrainLora(slot, rank, scale, values[:3], values[3:], sums[:3], sums[3:]))
    return loras
