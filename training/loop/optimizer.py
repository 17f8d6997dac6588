"""AdamW that leaves experts alone whose LoRA no row of a step has gone through.

The experts' matrices of a layer are stacked, so such an expert has a gradient of zeros: AdamW still decays its weight
and its moments, and moves it by them. Where each expert's matrices are parameters of their own, as in PEFT on
transformers 4, they have no gradient then, and AdamW skips them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from training.experts.base import ExpertLora
from training.layer import ExpertsLoraLayer


def expert_loras(model: nn.Module, adapter: str = "default") -> list[ExpertLora]:
    """Of each layer with experts."""
    layers = [module for module in model.modules() if isinstance(module, ExpertsLoraLayer)]
    return [layer.lora(adapter) for layer in layers if adapter in layer.lora_experts]


class SkippingAdamW(torch.optim.AdamW):
    """Experts count their steps one by one. A checkpoint's `step` of their matrices is float32 [E]."""

    def __init__(self, params: Iterable[Any], loras: Iterable[ExpertLora], **settings: Any) -> None:
        super().__init__(params, **settings)
        self._loras = list(loras)
        self._of = {id(parameter): lora for lora in self._loras for parameter in lora.parameters()}
        for lora in self._loras:
            lora.chosen = torch.zeros(len(lora.gate_lora_a), dtype=torch.bool)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of all parameters that have a gradient; of experts' matrices, of those that were chosen since the
        last one."""
        held = [
            (parameter, parameter.grad, group)
            for group in self.param_groups
            for parameter in group["params"]
            if id(parameter) in self._of and parameter.grad is not None
        ]
        for parameter, _, _ in held:
            parameter.grad = None
        loss = super().step(closure)
        for parameter, grad, group in held:
            parameter.grad = grad
            chosen = self._of[id(parameter)].chosen
            if chosen is not None and bool(chosen.any()):
                self._update(parameter, grad, group, chosen.nonzero()[:, 0].to(parameter.device))
        for lora in self._loras:
            if lora.chosen is not None:
                lora.chosen.zero_()
        return loss

    def _update(self, parameter: nn.Parameter, grad: torch.Tensor, group: dict[str, Any], rows: torch.Tensor) -> None:
        """`rows`: int64, the experts."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(len(parameter), device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        rate, (beta1, beta2) = group["lr"], group["betas"]
        state["step"][rows] += 1
        step = state["step"][rows].double()[:, None, None]
        size = (rate / (1 - beta1**step)).float()
        root = (1 - beta2**step).sqrt().float()
        grad = grad[rows]
        mean = state["exp_avg"][rows].lerp_(grad, 1 - beta1)
        square = state["exp_avg_sq"][rows].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        value = parameter[rows].mul_(1 - rate * group["weight_decay"])
        value -= size * mean / (square.sqrt() / root).add_(group["eps"])
        for tensor, new in ((parameter, value), (state["exp_avg"], mean), (state["exp_avg_sq"], square)):
            tensor.index_copy_(0, rows, new)
