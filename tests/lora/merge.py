"""Adapters merged into a transformers model in float32: what serving must equal."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine.lora.adapter import AdapterWeights, ExpertLora, ExtraMlp, LoraPair


def pair_delta(pair: LoraPair) -> torch.Tensor:
    """[out, in] float32."""
    return pair.scale * (pair.b.float() @ pair.a.float())


def expert_deltas(lora: ExpertLora) -> dict[str, torch.Tensor]:
    """gate, up [E, I, H] and down [E, H, I], float32."""
    return {
        "gate": lora.gate_scale * (lora.gate_b.float() @ lora.gate_a.float()),
        "up": lora.up_scale * (lora.up_b.float() @ lora.up_a.float()),
        "down": lora.down_scale * (lora.down_b.float() @ lora.down_a.float()),
    }


def all_deltas(weights: AdapterWeights) -> dict[str, torch.Tensor]:
    """Every delta of an adapter by a name, to compare two of them; deltas that are zero are left out."""
    deltas = {module: pair_delta(pair) for module, pair in weights.linears.items()}
    for layer, lora in weights.experts.items():
        deltas |= {f"layers.{layer}.{projection}": delta for projection, delta in expert_deltas(lora).items()}
    for layer, mlps in weights.extra_mlps.items():
        for index, mlp in enumerate(mlps):
            deltas |= {f"layers.{layer}.extra.{index}.{n}": getattr(mlp, n).float() for n in ("gate", "up", "down")}
    return {name: delta for name, delta in deltas.items() if bool(delta.any())}


@torch.no_grad()
def merge(model: nn.Module, weights: AdapterWeights) -> nn.Module:
    """Add an adapter's deltas to a transformers model, in place; returns the model.

    The model must be float32. Experts are stacked (gate_up_proj [E, 2I, H], down_proj [E, H, I]) or a module list.
    """
    parameters = dict(model.named_parameters())
    for name, pair in weights.linears.items():
        stored = name if f"{name}.weight" in parameters else name.replace("mlp.gate", "mlp.router")
        _add(parameters[f"{stored}.weight"], pair_delta(pair))
    for layer, lora in weights.experts.items():
        deltas = expert_deltas(lora)
        prefix = f"model.layers.{layer}.mlp.experts"
        if f"{prefix}.gate_up_proj_bias" in parameters:  # inputs before outputs, gate and up by turns
            gate_up, down = parameters[f"{prefix}.gate_up_proj"], parameters[f"{prefix}.down_proj"]
            for turn, projection in enumerate(("gate", "up")):
                gate_up[:, :, turn::2] += deltas[projection].transpose(1, 2)
            down += deltas["down"].transpose(1, 2)
            continue
        if f"{prefix}.gate_up_proj" in parameters:
            _add(parameters[f"{prefix}.gate_up_proj"], torch.cat([deltas["gate"], deltas["up"]], dim=1))
            _add(parameters[f"{prefix}.down_proj"], deltas["down"])
            continue
        for projection, delta in deltas.items():
            for expert in range(delta.shape[0]):
                _add(parameters[f"{prefix}.{expert}.{projection}_proj.weight"], delta[expert])
    for layer, mlps in weights.extra_mlps.items():
        _add_extra(model.get_submodule(f"model.layers.{layer}.mlp"), mlps)
    return model


def _add(parameter: nn.Parameter, delta: torch.Tensor) -> None:
    if parameter.dtype != torch.float32 or parameter.shape != delta.shape:
        raise ValueError(f"cannot add {list(delta.shape)} to {parameter.dtype} {list(parameter.shape)}")
    parameter += delta


def _add_extra(block: nn.Module, mlps: list[ExtraMlp]) -> None:
    forward = block.forward

    def with_extra(self: nn.Module, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = forward(hidden, *args, **kwargs)
        mean = torch.stack([extra_mlp(hidden, mlp) for mlp in mlps]).mean(0)
        return (out[0] + mean, *out[1:]) if isinstance(out, tuple) else out + mean

    block.forward = MethodType(with_extra, block)


def extra_mlp(hidden: torch.Tensor, mlp: ExtraMlp) -> torch.Tensor:
    """[..., H] -> [..., H] float32."""
    gated = F.silu(hidden @ mlp.gate.float().T) * (hidden @ mlp.up.float().T)
    return gated @ mlp.down.float().T
