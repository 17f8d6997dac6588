"""Routed experts as a module of transformers' model, and their LoRA as a layer of PEFT's.

`RoutedExperts` stands where a model has `mlp.experts`: no parameters, the weights are the kernels' packed ones.
`get_peft_model(model, ExpertLoraConfig(...))` puts an `ExpertsLoraLayer` around each, as it puts its own layers around
attention's projections; optimisers, clipping, checkpoints and `disable_adapter` then treat both alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners import lora as peft_lora
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from engine.errors import UserError
from training.config.fields import ATTENTION_TARGETS, EXPERT_TARGETS
from training.experts.base import ExpertLora, TrainableExperts
from training.experts.crossing import moved

PROJECTIONS = ("gate", "up", "down")


@dataclass
class BatchRows:
    """What LoRA has to know of a batch beyond its hidden states; shared by all layers, set before a forward."""

    mask: torch.Tensor | None = None  # bool [rows]: the tokens that are not padding; None: all; set before each layer
    slots: torch.Tensor | None = None  # int32 [rows]: 1 + index of the active adapter that acts on it; None: the first
    parts: tuple[int, ...] = ()  # with `slots`: rows of each active adapter, which lie behind one another

    def divide(self, parts: Sequence[int]) -> None:
        """The first parts[0] rows of the batches to come are the first active adapter's, and so on."""
        self.parts = tuple(parts)
        numbers = torch.arange(1, len(parts) + 1, dtype=torch.int32)
        self.slots = numbers.repeat_interleave(torch.tensor(self.parts))


class RoutedExperts(nn.Module):
    """One layer's frozen experts behind the call that transformers' blocks make. Padding costs nothing."""

    weight: torch.Tensor

    def __init__(self, experts: TrainableExperts, shape: tuple[int, int, int], rows: BatchRows) -> None:
        """`shape`: experts E, hidden size H, intermediate size I."""
        super().__init__()
        self.experts = experts
        self.shape = shape
        self.rows = rows
        self.register_buffer("weight", torch.empty(0), persistent=False)  # PEFT puts LoRA where a layer's weight is

    def forward(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        loras: Mapping[int, ExpertLora] | None = None,
    ) -> torch.Tensor:
        """hidden [T, H], ids and weights [T, k] -> [T, H]; rows of padding are zero. `loras`: by slot."""
        mask, slots = self.rows.mask, self.rows.slots
        if slots is None:
            slots = torch.full((len(hidden),), 1 if loras else 0, dtype=torch.int32)
        elif not loras:
            slots = torch.zeros_like(slots)
        if mask is not None:
            ids = ids.masked_fill(~mask[:, None], -1)
        if self.rows.parts and loras:  # an adapter without rows has no gradients either
            loras = {slot: loras[slot] for slot, count in enumerate(self.rows.parts, 1) if count}
        device = self.experts.device(len(hidden))
        x, ids, weights = (moved(tensor, device) for tensor in (hidden, ids, weights.float()))
        return moved(self.experts.forward(x, ids, weights, slots, loras or {}), hidden.device)


class ExpertsLoraLayer(nn.Module, LoraLayer):  # type: ignore[misc]  # PEFT has no types
    """`RoutedExperts` with the LoRA of any number of adapters."""

    adapter_layer_names = ("lora_experts",)
    base_layer: RoutedExperts
    r: dict[str, int]
    lora_alpha: dict[str, float]
    scaling: dict[str, float]

    def __init__(self, base_layer: RoutedExperts, adapter_name: str, config: LoraConfig, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        LoraLayer.__init__(self, base_layer)
        self.lora_experts = nn.ModuleDict()
        self._projections: dict[str, tuple[str, ...]] = {}
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, kwargs["r"], kwargs["lora_alpha"], config)

    def _get_in_out_features(self, module: RoutedExperts) -> tuple[int, int]:
        return module.shape[1], module.shape[1]

    def update_layer(self, adapter_name: str, r: int, lora_alpha: float, config: LoraConfig, **_: Any) -> None:
        """Add an adapter. UserError for what an expert's LoRA cannot be here."""
        if config.lora_dropout or config.use_rslora or config.use_dora or config.init_lora_weights is not True:
            raise UserError("LoRA on experts is plain LoRA: no dropout, rslora, DoRA or other initial values", "lora")
        if r <= 0:
            raise UserError(f"lora_rank is {r}; it must be at least 1", "lora_rank")
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.scaling[adapter_name] = lora_alpha / r
        self._projections[adapter_name] = getattr(config, "expert_projections", PROJECTIONS)
        experts, hidden, inner = self.base_layer.shape
        lora = ExpertLora(experts, r, hidden, inner, lora_alpha / r)
        lora.place(self.base_layer.experts.lora_device)
        self.lora_experts[adapter_name] = lora
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)  # type: ignore[operator]

    def _freeze_non_trainable_peft_weights(self, adapter_names: Any = None) -> None:
        """PEFT calls this whenever it has set `requires_grad`: projections without LoRA keep B = 0."""
        for adapter, projections in self._projections.items():
            for name, parameter in self.lora_experts[adapter].named_parameters():
                if not name.startswith(projections):
                    parameter.requires_grad_(False)

    def active_loras(self) -> dict[int, ExpertLora]:
        """By slot, which counts from 1; empty where adapters are switched off."""
        if self.disable_adapters:
            return {}
        names: list[str] = self.active_adapters  # type: ignore[assignment]
        active = [name for name in names if name in self.lora_experts]
        return {slot: self.lora(name) for slot, name in enumerate(active, 1)}

    def lora(self, adapter: str) -> ExpertLora:
        held: ExpertLora = self.lora_experts[adapter]  # type: ignore[assignment]
        return held

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(hidden, ids, weights, self.active_loras())
        return out

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise UserError("LoRA on experts cannot be merged: the base's weights are packed; serve the adapter", "merge")

    def unmerge(self) -> None:
        """Nothing is ever merged."""


class RowsLinear(peft_lora.Linear):  # type: ignore[misc]
    """PEFT's LoRA around a linear layer, each active adapter on its own rows of the batch (`BatchRows.parts`)."""

    rows: BatchRows

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.disable_adapters or not self.rows.parts:
            out: torch.Tensor = super().forward(x, *args, **kwargs)
            return out
        out = self.base_layer(x, *args, **kwargs)
        parts = torch.split(x.reshape(-1, x.shape[-1]), list(self.rows.parts))
        deltas = [self._delta(name, part) for name, part in zip(self.active_adapters, parts, strict=True) if len(part)]
        return (out + torch.cat(deltas).view(out.shape)).to(out.dtype)

    def _delta(self, adapter: str, x: torch.Tensor) -> torch.Tensor:
        a, b = self.lora_A[adapter], self.lora_B[adapter]
        delta: torch.Tensor = b(a(x.to(a.weight.dtype))) * self.scaling[adapter]
        return delta


@dataclass
class ExpertLoraConfig(LoraConfig):  # type: ignore[misc]
    """PEFT's LoraConfig that knows our experts: name `mlp.experts` among `target_modules`. `by_rows`: linear layers
    become `RowsLinear`, whose `rows` have to be set."""

    expert_projections: tuple[str, ...] = PROJECTIONS
    by_rows: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        layers: dict[type[nn.Module], type[nn.Module]] = {RoutedExperts: ExpertsLoraLayer}
        if self.by_rows:
            layers[nn.Linear] = RowsLinear
        self._register_custom_module(layers)


def lora_config(
    model: nn.Module,
    targets: tuple[str, ...] = ("all",),
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    by_rows: bool = False,
) -> ExpertLoraConfig:
    """LoRA on `targets`: names out of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, or `all`. The last
    three mean routed experts and, where a model has them, shared experts and dense layers. UserError for other names,
    and for dropout on experts."""
    allowed = (*ATTENTION_TARGETS, *EXPERT_TARGETS)
    chosen = allowed if targets == ("all",) else targets
    unknown = [name for name in chosen if name not in allowed]
    if unknown or not chosen:
        said = ", ".join(unknown) or "nothing"
        raise UserError(f"lora_target: {said}; allowed are all, or some of {', '.join(allowed)}", "lora_target")
    projections = tuple(name.removesuffix("_proj") for name in EXPERT_TARGETS if name in chosen)
    if projections and dropout:
        raise UserError(
            f"lora_dropout is {dropout:g}; LoRA on experts has no dropout: set it to 0, or lora_target to attention's "
            f"{','.join(ATTENTION_TARGETS)}",
            "lora_dropout",
        )
    # With their parents' names: by a bare gate_proj PEFT understands the experts of transformers 4.
    linears = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    modules = {".".join(name.split(".")[-2:]) for name in linears if name.rpartition(".")[2] in chosen}
    if projections and any(isinstance(module, RoutedExperts) for module in model.modules()):
        modules.add("mlp.experts")
    return ExpertLoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=sorted(modules),
        task_type="CAUSAL_LM",
        expert_projections=projections or PROJECTIONS,
        by_rows=by_rows,
    )
