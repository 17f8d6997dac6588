"""A mixture-of-experts block whose experts are our kernels', with LoRA of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from training.experts.base import ExpertLora, TrainableExperts
from training.kt.errors import KTAMXBackwardError, KTAMXConfigError, KTAMXForwardError
from training.kt.families import MOEArchConfig
from training.layer import BatchRows, ExpertProjection, ExpertsLoraLayer, RoutedExperts, place_experts

LORA_NAMES = ("gate_lora_a", "gate_lora_b", "up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b")
_SLOT = 1
_ADAPTER = "default"  # until PEFT's first adapter gives it its name


@dataclass(frozen=True)
class LoraSize:
    rank: int
    alpha: float


class MOEAMXFunction(torch.autograd.Function):
    """`MOEAMXFunction.apply(hidden, topk_ids, topk_weights, experts, lora, *lora.matrices())`

    hidden [..., H] float32 or bfloat16 with T rows in all, topk_ids [T, k] (-1: skipped), topk_weights [T, k], on any
    device; `experts`: a TrainableExperts; `lora`: its ExpertLora, None: the experts alone. Gives hidden's shape, type
    and device, and gradients of hidden, topk_weights and the six matrices. KTAMXForwardError, KTAMXBackwardError.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        experts: TrainableExperts,
        lora: ExpertLora | None,
        *matrices: torch.Tensor,
    ) -> torch.Tensor:
        x = hidden.detach().reshape(-1, hidden.shape[-1]).cpu().requires_grad_(hidden.requires_grad)
        weights = topk_weights.detach().float().cpu().requires_grad_(topk_weights.requires_grad)
        loras = {} if lora is None else {_SLOT: lora}
        slots = torch.full((len(x),), max(loras, default=0), dtype=torch.int32)
        try:
            with torch.set_grad_enabled(any(ctx.needs_input_grad)):
                out = experts.forward(x, topk_ids.detach().cpu().long(), weights, slots, loras)
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


class KernelExperts(RoutedExperts):
    """A layer's frozen experts, on whatever device their rows come from."""

    def forward(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        loras: Mapping[int, ExpertLora] | None = None,
    ) -> torch.Tensor:
        if len(loras or {}) > 1:
            raise KTAMXForwardError("several adapters are active at once; set_adapter names one", "adapter")
        if self.rows.mask is not None:
            ids = ids.masked_fill(~self.rows.mask[:, None], -1)
        lora = None if not loras else loras[_SLOT]
        matrices = () if lora is None else lora.matrices()
        out: torch.Tensor = MOEAMXFunction.apply(  # type: ignore[no-untyped-call]
            hidden, ids, weights, self.experts, lora, *matrices
        )
        return out


class MOELayerWrapper(nn.Module):
    """Stands where `original_moe` stood: computes as it does, with its router and shared experts under their own names,
    but for `experts`, which PEFT's adapters share (`training.layer`). The original's expert weights are not kept.

    `moe_config`, `hidden_size`, `layer_idx`, `router_type` describe the layer; `router`, `shared_experts` (None: the
    family has none) and `original_moe` are the block's parts; `moe_amx` computes the experts on the threads of
    `cpu_infer`.
    """

    def __init__(
        self,
        original_moe: nn.Module,
        experts: TrainableExperts,
        lora: LoraSize,
        layer_idx: int,
        *,
        moe_config: MOEArchConfig,
        cpu_infer: Any,
        rows: BatchRows,
    ) -> None:
        super().__init__()
        own = vars(self)
        own.update({name: value for name, value in vars(original_moe).items() if name not in own})
        self._compute = type(original_moe).forward
        self.layer_idx, self.moe_config, self.router_type = layer_idx, moe_config, moe_config.router_type
        self.hidden_size, self.cpu_infer = experts.hidden_size, cpu_infer
        self._is_kt_moe_wrapper = True
        for name, parameter in original_moe.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in original_moe.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        for name, child in original_moe.named_children():
            if name != moe_config.experts_attr and not isinstance(child, ExpertProjection):
                self.add_module(name, child)
        sizes = experts.num_experts, experts.hidden_size, experts.intermediate_size
        place_experts(self, KernelExperts(experts, sizes, rows), (_ADAPTER, lora.rank, lora.alpha))
        if not hasattr(self, "shared_experts"):
            own["shared_experts"] = getattr(original_moe, "shared_expert", None)  # no child: it has a name already
        original_moe.register_module(moe_config.experts_attr, self._layer)
        own["original_moe"] = original_moe
        self.train(original_moe.training)

    @property
    def router(self) -> nn.Module:
        return self.get_submodule(self.moe_config.router_attr)

    @property
    def moe_amx(self) -> TrainableExperts:
        kernels: TrainableExperts = self._layer.base_layer.experts
        return kernels

    @property
    def lora(self) -> ExpertLora:
        """Of the active adapter, or of the first."""
        layer = self._layer
        return layer.active_loras().get(_SLOT) or layer.lora(next(iter(layer.lora_experts)))

    @property
    def lora_params(self) -> dict[str, nn.Parameter]:
        """gate_lora_a [E, r, H], gate_lora_b [E, I, r], up's likewise, down_lora_a [E, r, I], down_lora_b [E, H, r]."""
        return {name: self.lora.get_parameter(name) for name in LORA_NAMES}

    @property
    def _layer(self) -> ExpertsLoraLayer:
        layer: Any = self.get_submodule("experts")
        return layer  # type: ignore[no-any-return]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[B, S, H] -> [B, S, H]"""
        out: torch.Tensor = self._compute(self, hidden_states)
        return out

    def update_lora_pointers(self) -> None:
        """After the matrices' memory was replaced. They are read where they are at each forward, so this only looks
        whether they still fit: KTAMXConfigError if not."""
        try:
            self.moe_amx.check_lora(_SLOT, self.lora)
        except ValueError as error:
            raise KTAMXConfigError(f"layer {self.layer_idx}: {error}", "lora") from error
