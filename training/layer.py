"""Routed experts as a module of transformers' model, and their LoRA as a layer of PEFT's.

`RoutedExperts` stands where a model has `mlp.experts`: no parameters, the weights are the kernels' packed ones.
Around each is an `ExpertsLoraLayer`, which takes adapters as PEFT's own layers around attention's projections do:
`get_peft_model` and `PeftModel.from_pretrained` reach it by the projections' names (`ExpertProjection`). Optimisers,
clipping, checkpoints and `disable_adapter` then treat both alike.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners import lora as peft_lora
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from engine.errors import UserError
from training.config.fields import ATTENTION_TARGETS, EXPERT_TARGETS
from training.experts.base import ExpertLora, TrainableExperts

PROJECTIONS = ("gate", "up", "down")
_EXPERT_KEY = re.compile(r"(\d+)\.(gate|up|down)_proj\.lora_([AB])(?:\.([^.]+))?\.weight")


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

    def __init__(
        self, experts: TrainableExperts, shape: tuple[int, int, int], rows: BatchRows, *, by_turns: bool = False
    ) -> None:
        """`shape`: experts E, hidden size H, intermediate size I. `by_turns`: as in `StockModel`."""
        super().__init__()
        self.by_turns = by_turns
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
        if torch.is_grad_enabled():
            for slot, lora in (loras or {}).items():
                lora.note(ids[(slots == slot).to(ids.device)] if self.rows.parts else ids)
        device = self.experts.device(len(hidden))
        x, ids, weights = (_on(tensor, device) for tensor in (hidden, ids, weights.float()))
        return _on(self.experts.forward(x, ids, weights, slots, loras or {}), hidden.device)


class ExpertsLoraLayer(nn.Module, LoraLayer):  # type: ignore[misc]  # PEFT has no types
    """`RoutedExperts` with the LoRA of any number of adapters, none at first.

    `own_adapter`: name, rank and alpha of one that is there before PEFT adds any, as KTransformers' calls have it: the
    first adapter of PEFT's is then this one, under PEFT's name.
    """

    adapter_layer_names = ("lora_experts",)
    base_layer: RoutedExperts
    r: dict[str, int]
    lora_alpha: dict[str, float]
    scaling: dict[str, float]

    def __init__(self, base_layer: RoutedExperts, own_adapter: tuple[str, int, float] | None = None) -> None:
        nn.Module.__init__(self)
        LoraLayer.__init__(self, base_layer)
        self.lora_experts = nn.ModuleDict()
        self._projections: dict[str, tuple[str, ...]] = {}
        self._unclaimed: str | None = None
        self._added = ""
        self.register_load_state_dict_pre_hook(_stack_experts)  # type: ignore[no-untyped-call]
        if own_adapter is not None:
            name, rank, alpha = own_adapter
            self._add(name, rank, alpha, PROJECTIONS)
            self.set_adapter([name])
            self._unclaimed = name

    def _get_in_out_features(self, module: RoutedExperts) -> tuple[int, int]:
        return module.shape[1], module.shape[1]

    def update_layer(
        self,
        adapter_name: str,
        r: int,
        lora_alpha: float,
        config: LoraConfig,
        projections: tuple[str, ...] = PROJECTIONS,
        **_: Any,
    ) -> None:
        """Add an adapter, or `projections` to it. UserError for what an expert's LoRA cannot be here."""
        dropout = config.lora_dropout and not config.inference_mode
        if dropout or config.use_rslora or config.use_dora or config.init_lora_weights is not True:
            raise UserError("LoRA on experts is plain LoRA: no dropout, rslora, DoRA or other initial values", "lora")
        if r <= 0:
            raise UserError(f"lora_rank is {r}; it must be at least 1", "lora_rank")
        if self._unclaimed is not None:
            self._claim(adapter_name)
            if (self.r[adapter_name], self.lora_alpha[adapter_name]) != (r, lora_alpha):
                self._add(adapter_name, r, lora_alpha, PROJECTIONS)
        elif adapter_name not in self.lora_experts:
            self._add(adapter_name, r, lora_alpha, projections)
        elif (self.r[adapter_name], self.lora_alpha[adapter_name]) != (r, lora_alpha):
            raise UserError("gate_proj, up_proj and down_proj of experts have one rank and one alpha", "lora_rank")
        else:
            self._projections[adapter_name] = (*self._projections[adapter_name], *projections)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)  # type: ignore[arg-type]

    def _add(self, adapter: str, rank: int, alpha: float, projections: tuple[str, ...]) -> None:
        self.r[adapter], self.lora_alpha[adapter], self.scaling[adapter] = rank, alpha, alpha / rank
        self._projections[adapter], self._added = projections, adapter
        experts, hidden, inner = self.base_layer.shape
        self.lora_experts[adapter] = ExpertLora(experts, rank, hidden, inner, alpha / rank)
        self._move_adapter_to_device_of_base_layer(adapter)

    def _claim(self, adapter: str) -> None:
        """Give the adapter that was there before PEFT's first the name of that one."""
        old, self._unclaimed = self._unclaimed, None
        if old is None or old == adapter:
            return
        by_name: tuple[Any, ...] = (self.r, self.lora_alpha, self.scaling, self._projections, self.lora_experts)
        for held in by_name:
            held[adapter] = held.pop(old)
        self._added = adapter

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        names = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        if self._unclaimed is not None and names:
            self._claim(names[0])
        super().set_adapter(names, inference_mode=inference_mode)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: Any = None) -> None:
        """Where the experts have their LoRA; PEFT calls this when it has read one."""
        if adapter_name in self.lora_experts:
            self.lora(adapter_name).place(self.base_layer.experts.lora_device)

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

    def adapter_of(self, name: str | None) -> str:
        """The adapter that tensors are of whose keys name `name`, or none: the one that was added last."""
        return name if name is not None and name in self.lora_experts else self._added

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(hidden, ids, weights, self.active_loras())
        return out

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise UserError("LoRA on experts cannot be merged: the base's weights are packed; serve the adapter", "merge")

    def unmerge(self) -> None:
        """Nothing is ever merged."""


class ExpertProjection(nn.Module, LoraLayer):  # type: ignore[misc]
    """What PEFT finds where a configuration names `gate_proj`, `up_proj` or `down_proj`, as those of finished adapters
    do: an adapter that is put on it is put on all experts of the layer."""

    adapter_layer_names = ()

    def __init__(self, layer: ExpertsLoraLayer, projection: str) -> None:
        nn.Module.__init__(self)
        LoraLayer.__init__(self, nn.Identity())
        object.__setattr__(self, "layer", layer)  # no child: its parameters have one name
        self.projection = projection

    def _get_in_out_features(self, module: nn.Module) -> tuple[None, None]:
        return None, None

    def update_layer(self, adapter_name: str, r: int, lora_alpha: float, config: LoraConfig, **_: Any) -> None:
        layer: ExpertsLoraLayer = vars(self)["layer"]
        layer.update_layer(adapter_name, r, lora_alpha, config, (self.projection,))


def place_experts(block: nn.Module, experts: RoutedExperts, own_adapter: tuple[str, int, float] | None = None) -> None:
    """Makes `experts` those of a mixture-of-experts block, where PEFT finds them."""
    layer = ExpertsLoraLayer(experts, own_adapter)
    block.register_module("experts", layer)
    for projection in PROJECTIONS:
        block.register_module(f"{projection}_proj", ExpertProjection(layer, projection))


def _stack_experts(layer: ExpertsLoraLayer, state: dict[str, torch.Tensor], prefix: str, *_: Any) -> None:
    """Before a layer reads its tensors: PEFT's keys per expert, of a finished adapter, become the layer's own."""
    found: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for key in [key for key in state if key.startswith(prefix)]:
        if match := _EXPERT_KEY.fullmatch(key, len(prefix)):
            expert, projection, half, name = match.groups()
            place = layer.adapter_of(name), f"{projection}_lora_{half.lower()}"
            found.setdefault(place, {})[int(expert)] = state.pop(key)
    for (adapter, name), experts in found.items():
        held = layer.lora(adapter).get_parameter(name).detach()
        stacked = torch.zeros(held.shape) if held.is_meta else held.to("cpu", torch.float32, copy=True)
        for expert, value in experts.items():
            if expert >= len(stacked) or value.shape != stacked.shape[1:]:
                wanted = f"{len(stacked)} experts of {tuple(stacked.shape[1:])}"
                raise UserError(f"{prefix}{expert}: {name} is {tuple(value.shape)}; the model has {wanted}", "adapter")
            stacked[expert] = value
        state[f"{prefix}lora_experts.{adapter}.{name}"] = stacked


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


def with_lora(model: PreTrainedModel, config: LoraConfig, adapter: str = "default") -> PeftModel:
    """PEFT's `get_peft_model`. It takes the layers that wait for an adapter for those of an earlier one, and warns."""
    with unwarned():
        return get_peft_model(model, config, adapter_name=adapter)


@contextmanager
def unwarned() -> Iterator[None]:
    """Within, PEFT does not say that there are layers of an adapter already."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are trying to modify a model with PEFT for a second time")
        yield


def lora_config(
    model: nn.Module,
    targets: tuple[str, ...] = ("all",),
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    by_rows: bool = False,
) -> LoraConfig:
    """LoRA on `targets`: names of ATTENTION_TARGETS and EXPERT_TARGETS, or `all`. The latter mean routed experts and,
    where a model has them, shared experts and dense layers. `by_rows`: linear layers
    become `RowsLinear`, whose `rows` have to be set. UserError for other names, and for dropout on experts."""
    allowed = (*ATTENTION_TARGETS, *EXPERT_TARGETS)
    chosen = allowed if targets == ("all",) else targets
    unknown = [name for name in chosen if name not in allowed]
    if unknown or not chosen:
        said = ", ".join(unknown) or "nothing"
        raise UserError(f"lora_target: {said}; allowed are all, or some of {', '.join(allowed)}", "lora_target")
    if dropout and set(chosen) & set(EXPERT_TARGETS):
        raise UserError(
            f"lora_dropout is {dropout:g}; LoRA on experts has no dropout: set it to 0, or lora_target to attention's "
            f"{','.join(ATTENTION_TARGETS)}",
            "lora_dropout",
        )
    # With their parents' names: a shared expert's gate_proj is another one than the experts'.
    named = [(name, module) for name, module in model.named_modules() if name.rpartition(".")[2] in chosen]
    found = (name for name, module in named if isinstance(module, nn.Linear | ExpertProjection))
    modules = sorted({".".join(name.split(".")[-2:]) for name in found})
    if not modules:
        raise UserError(f"lora_target: {', '.join(chosen)}; the model has none of them", "lora_target")
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=modules, task_type="CAUSAL_LM")
    if by_rows:
        config._register_custom_module({nn.Linear: RowsLinear})
    return config


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On `device`, differentiable, by way of page-locked memory; the tensor itself if it is on such a device."""
    if tensor.device.type == device.type:
        return tensor
    there: torch.Tensor = _Moved.apply(tensor, device)  # type: ignore[no-untyped-call]
    return there


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        ctx.device = tensor.device
        return _copied(tensor, device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _copied(grad, ctx.device), None


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return tensor.to(device)
    locked = tensor.is_cuda  # other devices, as in tests, have no such memory
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=locked).copy_(tensor)
