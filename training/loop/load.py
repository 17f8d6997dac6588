"""A finished adapter as the start of a run: its rank, scale and targets, then its matrices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from engine.lora.adapter import AdapterWeights, ExpertLora, LoraPair
from engine.lora.files.parse import parse_adapter
from engine.lora.files.whole import base_tables
from engine.weights.open import open_model
from training.config import TrainConfig
from training.config.fields import ATTENTION_TARGETS, EXPERT_TARGETS
from training.layer import PROJECTIONS, ExpertsLoraLayer
from training.loop.resume import TrainingError
from training.loop.save import layer_of, module_name
from training.names import transformers_name


def started(config: TrainConfig) -> tuple[TrainConfig, AdapterWeights | None]:
    """`config` with the rank, the alpha and the targets of the adapter that it goes on with, and that adapter, in any
    form that is served; itself, and None, if it begins with a new one. UserError for one that cannot be trained."""
    if config.adapter_name_or_path is None:
        return config, None
    folder = Path(config.adapter_name_or_path)
    source = open_model(config.model_name_or_path)
    model = source.config
    weights = parse_adapter(folder, model, name=folder.name or str(folder), tables=base_tables(source))
    modules = (module for layer in range(model.num_hidden_layers) for module in model.modules(layer))
    has = {*EXPERT_TARGETS, *(transformers_name(module.name).rpartition(".")[2] for module in modules)}
    known = [name for name in (*ATTENTION_TARGETS, *EXPERT_TARGETS) if name in has]
    targets = {transformers_name(name).rpartition(".")[2] for name in weights.linears}
    unknown = sorted(targets - set(known))
    if weights.extra_mlps or unknown:
        what = "MLPs beside the experts" if weights.extra_mlps else f"LoRA on {', '.join(unknown)}"
        raise TrainingError(f"{folder} has {what}, which is not trained here", "adapter_name_or_path")
    if config.lora_dropout and weights.experts:
        message = f"lora_dropout is {config.lora_dropout:g}, and {folder} has LoRA on experts, which has no dropout"
        raise TrainingError(f"{message}: set it to 0", "lora_dropout")
    for lora in weights.experts.values():
        targets |= {f"{name}_proj" for name in PROJECTIONS if bool(getattr(lora, f"{name}_b").any())}
    rank = max(weights.rank, 1)
    return replace(
        config,
        lora_rank=rank,
        lora_alpha=_scale(weights) * rank,
        lora_target=("all",) if targets == set(known) else tuple(name for name in known if name in targets),
    ), weights


@torch.no_grad()
def load_adapter(model: nn.Module, weights: AdapterWeights, adapter: str = "default") -> None:
    """Into `adapter` of a PEFT model that has its targets at its rank or a larger one. Ranks that it lacks keep the
    model's A, with B = 0. TrainingError for LoRA where the model has none."""
    linears = {transformers_name(name): pair for name, pair in weights.linears.items()}
    experts = dict(weights.experts)
    for path, module in model.named_modules():
        name = module_name(path)
        if isinstance(module, ExpertsLoraLayer):
            if adapter in module.lora_experts and (lora := experts.pop(layer_of(name), None)) is not None:
                held = module.lora(adapter)
                for projection in PROJECTIONS:
                    a, b = (held.get_parameter(f"{projection}_lora_{half}") for half in "ab")
                    _copy(_pair(lora, projection), a, b, held.scaling)
        elif isinstance(module, LoraLayer) and adapter in module.lora_A and name in linears:
            a, b = (half[adapter].weight for half in (module.lora_A, module.lora_B))
            _copy(linears.pop(name), a, b, module.scaling[adapter])
    if linears or experts:
        left = next(iter(linears), None) or f"the experts of layer {next(iter(experts))}"
        raise TrainingError(f"{weights.path}: LoRA on {left}, which the model does not have", "adapter_name_or_path")


def _copy(pair: LoraPair, a: torch.Tensor, b: torch.Tensor, scaling: float) -> None:
    """A [..., r, in], B [..., out, r]. A scale other than `scaling` is multiplied into B."""
    rank = pair.a.shape[-2]
    a[..., :rank, :].copy_(pair.a)
    b.zero_()
    b[..., :rank].copy_(pair.b.float() * (pair.scale / scaling))


def _pair(lora: ExpertLora, projection: str) -> LoraPair:
    return LoraPair(*(getattr(lora, f"{projection}_{name}") for name in ("a", "b", "scale")))


def _scale(weights: AdapterWeights) -> float:
    """The scale of all pairs, or 1 where they differ."""
    scales = {pair.scale for pair in weights.linears.values()}
    scales |= {_pair(lora, name).scale for lora in weights.experts.values() for name in PROJECTIONS}
    return scales.pop() if len(scales) == 1 else 1.0
