"""A mixture-of-experts block whose experts are our kernels', with LoRA of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from training.experts.base import ExpertLora, TrainableExperts
from training.kt.errors import KTAMXBackwardError, KTAMXConfigError, KTAMXForwardError

LORA_NAMES = ("gate_lora_a", "gate_lora_b", "up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b")
_SLOT = 1


class MOEAMXFunction(torch.autograd.Function):
    """`MOEAMXFunction.apply(hidden, topk_ids, topk_weights, experts, lora, *lora.matrices())`

    hidden [..., H] float32 or bfloat16 with T rows in all, topk_ids [T, k] (-1: skipped), topk_weights [T, k], on any
    device; `experts`: a TrainableExperts; `lora`: its ExpertLora. Gives hidden's shape, type and device, and gradients
    of hidden, topk_weights and the six matrices. KTAMXForwardError, KTAMXBackwardError.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        experts: TrainableExperts,
        lora: ExpertLora,
        *matrices: torch.Tensor,
    ) -> torch.Tensor:
        x = hidden.detach().reshape(-1, hidden.shape[-1]).cpu().requires_grad_(hidden.requires_grad)
        weights = topk_weights.detach().float().cpu().requires_grad_(topk_weights.requires_grad)
        slots = torch.full((len(x),), _SLOT, dtype=torch.int32)
        try:
            with torch.set_grad_enabled(any(ctx.needs_input_grad)):
                out = experts.forward(x, topk_ids.detach().cpu().long(), weights, slots, {_SLOT: lora})
        except (ValueError, RuntimeError, MemoryError) as error:
            raise KTAMXForwardError(f"the experts' forward pass of {tuple(hidden.shape)}: {error}") from error
        ctx.out, ctx.leaves, ctx.place = out, (x, weights, *matrices), (hidden.device, topk_weights.dtype)
        return out.detach().reshape(hidden.shape).to(hidden.device)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.leaves is None:
            raise KTAMXBackwardError("a second backward pass over one forward, whose values are freed: run it again")
        device, dtype = ctx.place
        wanted = [leaf for leaf in ctx.leaves if leaf.requires_grad]
        try:
            found = torch.autograd.grad(ctx.out, wanted, grad_out.reshape(ctx.out.shape).to(ctx.out))
        except (ValueError, RuntimeError, MemoryError) as error:
            raise KTAMXBackwardError(f"the experts' backward pass of {tuple(grad_out.shape)}: {error}") from error
        grads = iter(found)
        x, weights, *matrices = (next(grads) if leaf.requires_grad else None for leaf in ctx.leaves)
        ctx.out = ctx.leaves = None
        x = None if x is None else x.reshape(grad_out.shape).to(device)
        weights = None if weights is None else weights.to(device, dtype)
        return x, None, weights, None, None, *matrices


class _Experts(nn.Module):
    """In the place of a block's `experts`."""

    def __init__(self, experts: TrainableExperts, lora: ExpertLora) -> None:
        super().__init__()
        self.kernels, self.lora = experts, lora

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = MOEAMXFunction.apply(  # type: ignore[no-untyped-call]
            hidden, ids, weights, self.kernels, self.lora, *self.lora.matrices()
        )
        return out


class MOELayerWrapper(nn.Module):
    """Stands where `original_moe` stood: computes as it does, with its router and shared experts under their own names,
    but for `experts`. The original's expert weights are not kept."""

    def __init__(self, original_moe: nn.Module, experts: TrainableExperts, lora: ExpertLora, layer_idx: int) -> None:
        super().__init__()
        own = vars(self)
        own.update({name: value for name, value in vars(original_moe).items() if name not in own})
        self._compute = type(original_moe).forward
        self.layer_idx = layer_idx
        for name, parameter in original_moe.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, child in original_moe.named_children():
            self.add_module(name, _Experts(experts, lora) if name == "experts" else child)
        self.train(original_moe.training)

    @property
    def lora_params(self) -> dict[str, nn.Parameter]:
        """gate_lora_a [E, r, H], gate_lora_b [E, I, r], up's likewise, down_lora_a [E, r, I], down_lora_b [E, H, r]."""
        lora = self.get_submodule("experts.lora")
        return {name: lora.get_parameter(name) for name in LORA_NAMES}

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[B, S, H] -> [B, S, H]"""
        out: torch.Tensor = self._compute(self, hidden_states)
        return out

    def update_lora_pointers(self) -> None:
        """After the matrices' memory was replaced. They are read where they are at each forward, so this only looks
        whether they still fit: KTAMXConfigError if not."""
        experts: Any = self.get_submodule("experts")
        try:
            experts.kernels._check_lora(_SLOT, experts.lora)
        except ValueError as error:
            raise KTAMXConfigError(f"layer {self.layer_idx}: {error}", "lora") from error
