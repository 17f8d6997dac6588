"""From a model in training to an adapter's files (`engine.lora.files.writer`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from engine.architectures.registry import architectures
from engine.lora.adapter import AdapterWeights, ExpertLora, LoraPair
from engine.lora.files.writer import StockModel, write_adapter
from training.layer import ExpertsLoraLayer, RoutedExperts

_PREFIX = "base_model.model."
_EXPERTS = ".mlp.experts"


def adapter_weights(model: nn.Module, adapter: str = "default", experts: torch.dtype | None = None) -> AdapterWeights:
    """What is trained of `adapter` in a PEFT model. `experts`: the type that the experts' matrices are rounded to;
    None: float32, as they are. The rest stays in float32."""
    found = AdapterWeights(adapter, "peft-per-expert")
    for path, module in model.named_modules():
        name = module_name(path)
        if isinstance(module, ExpertsLoraLayer) and adapter in module.lora_experts:
            found.experts[layer_of(name)] = _expert_lora(module, adapter, experts or torch.float32)
        elif isinstance(module, LoraLayer) and adapter in module.lora_A:
            a, b = (half[adapter].weight.detach().float() for half in (module.lora_A, module.lora_B))
            found.linears[name] = LoraPair(a, b, float(module.scaling[adapter]))
    return found


def save_adapter(
    model: nn.Module,
    folder: Path,
    form: str = "peft",
    *,
    adapter: str = "default",
    base: str | None = None,
    experts: torch.dtype | None = None,
) -> None:
    """Writes `adapter` of a PEFT model in a form that is served: `peft` or `kt-fused`. UserError if that fails."""
    config: Any = model.config  # of transformers
    kind = type(config).model_type  # not the config's own: that is marked as packed
    # Of a model by KTransformers' calls PEFT reads them back over packed experts, whose names are ours.
    kt = getattr(model, "_kt_wrappers", None) is not None
    names = [] if kt else [family.stored for family in architectures() if family.name == kind]
    weights = adapter_weights(model, adapter, experts)
    # PEFT finds the experts of a model that is loaded here by their projections' names.
    by_turns = any(module.by_turns for module in model.modules() if isinstance(module, RoutedExperts))
    write_adapter(weights, folder, form, base=base, stock=StockModel(names[0] if names else str, by_turns))


def module_name(path: str) -> str:
    """A module's name in the model, of that within PEFT's wrapper."""
    return path.removeprefix(_PREFIX)


def layer_of(name: str) -> int:
    """The decoder layer of a module of experts."""
    return int(name.removesuffix(_EXPERTS).rpartition(".")[2])


def _expert_lora(layer: ExpertsLoraLayer, adapter: str, dtype: torch.dtype) -> ExpertLora:
    lora = layer.lora(adapter)
    ga, ua, da, gb, ub, db = (matrix.detach().to(dtype) for matrix in lora.matrices())
    return ExpertLora(ga, gb, ua, ub, da, db, lora.scaling, lora.scaling, lora.scaling)
