"""Experts' LoRA of KTransformers' models, from and into adapter folders."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from training.experts.base import ExpertLora
from training.kt.errors import KTAMXConfigError
from training.kt.wrapper import MOELayerWrapper
from training.loop.save import save_adapter

_EXPERT = re.compile(
    r".*\blayers\.(\d+)\.(?:mlp|block_sparse_moe)\.(?:original_moe\.)?experts\.(\d+)\."
    r"(gate_proj|up_proj|down_proj|w1|w2|w3)\.lora_([AB])(?:\.[^.]+)?\.weight"
)
_STACKED = re.compile(
    r".*\blayers\.(\d+)\.(?:mlp\.)?experts\.(?:lora_experts\.(?:[^.]+\.)?)?(gate|up|down)_lora_([ab])"
)
_PROJECTIONS = {"w1": "gate", "w2": "down", "w3": "up"}
Tensors = dict[int, dict[str, torch.Tensor]]  # by layer and name, stacked over the experts


def get_kt_lora_params(model: nn.Module) -> list[nn.Parameter]:
    """The experts' matrices, layer by layer."""
    return [parameter for wrapper in wrappers_of(model) for parameter in wrapper.lora_params.values()]


def update_kt_lora_pointers(model: nn.Module) -> None:
    """After an optimiser's step; see `MOELayerWrapper.update_lora_pointers`."""
    for wrapper in wrappers_of(model):
        wrapper.update_lora_pointers()


@torch.no_grad()
def load_moe_lora_from_adapter(model: nn.Module, adapter_path: str | Path) -> None:
    """Experts' LoRA of a finished adapter or of a checkpoint, into a model whose own has at least its rank. Its scale
    is multiplied into B where the model's is another one; projections and experts that the files lack get B = 0.
    KTAMXConfigError, the model then being as it was, for a folder without experts and for shapes that do not fit."""
    folder = Path(adapter_path)
    wrappers = {wrapper.layer_idx: wrapper for wrapper in wrappers_of(model)}
    found = _read(folder)
    if not found:
        raise KTAMXConfigError(f"{folder}: no LoRA on experts", "adapter_path")
    if unknown := sorted(found.keys() - wrappers.keys()):
        raise KTAMXConfigError(f"{folder}: LoRA on experts of layer {unknown[0]}, which has none", "adapter_path")
    scale = _scale(folder)
    read = {layer: _fitted(found.get(layer, {}), wrapper.lora, scale, folder) for layer, wrapper in wrappers.items()}
    for layer, wrapper in wrappers.items():
        for name, parameter in wrapper.lora_params.items():
            parameter.copy_(read[layer][name])


def save_moe_lora_to_adapter(model: Any, output_dir: str | Path) -> None:
    """Writes the adapter of a model by these calls, its attention's LoRA too, as `ktserve train` does. UserError if
    that fails."""
    wrappers_of(model)
    adapter = getattr(model, "active_adapter", "default")
    save_adapter(model, Path(output_dir), adapter=adapter if isinstance(adapter, str) else adapter[0])


def wrappers_of(model: nn.Module) -> list[MOELayerWrapper]:
    """KTAMXConfigError if there are none."""
    found = [module for module in model.modules() if isinstance(module, MOELayerWrapper)]
    if not found:
        raise KTAMXConfigError("the model's layers are not wrapped: load it with load_kt_model", "model")
    return found


def _read(folder: Path) -> Tensors:
    stacked: Tensors = {}
    single: dict[tuple[int, str], dict[int, torch.Tensor]] = {}
    for key, tensor in _tensors(folder):
        if match := _EXPERT.fullmatch(key):
            layer, expert, projection, half = match.groups()
            name = f"{_PROJECTIONS.get(projection, projection.removesuffix('_proj'))}_lora_{half.lower()}"
            single.setdefault((int(layer), name), {})[int(expert)] = tensor
        elif match := _STACKED.fullmatch(key):
            stacked.setdefault(int(match[1]), {})[f"{match[2]}_lora_{match[3]}"] = tensor
    for (layer, name), tensors in single.items():
        first = next(iter(tensors.values()))
        whole = first.new_zeros(max(tensors) + 1, *first.shape)
        for expert, tensor in tensors.items():
            if tensor.shape != first.shape:
                raise KTAMXConfigError(f"{folder}: layer {layer}: the experts' {name} differ in shape", "adapter_path")
            whole[expert] = tensor
        stacked.setdefault(layer, {})[name] = whole
    return stacked


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        for name in ("adapter_model.safetensors", "fused_expert_lora.safetensors"):
            if (folder / name).is_file():
                yield from load_file(folder / name).items()
        if (folder / "adapter_model.bin").is_file():
            yield from torch.load(folder / "adapter_model.bin", map_location="cpu", weights_only=True).items()
    except (OSError, SafetensorError, RuntimeError) as error:
        raise KTAMXConfigError(f"{folder} cannot be read: {error}", "adapter_path") from error


def _scale(folder: Path) -> float | None:
    """alpha / r of the folder's adapter_config.json; None without one."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        return float(config["lora_alpha"]) / int(config["r"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise KTAMXConfigError(f"{folder}/adapter_config.json cannot be read: {error}", "adapter_path") from error


def _fitted(
    tensors: Mapping[str, torch.Tensor], lora: ExpertLora, scale: float | None, folder: Path
) -> dict[str, torch.Tensor]:
    """All six matrices as `lora` has them. Ranks that the file lacks keep the model's A, with B = 0."""
    factor = 1.0 if scale is None else scale / lora.scaling
    fitted = {}
    for name, held in lora.named_parameters():
        half_b = name.endswith("b")
        value = torch.zeros_like(held) if half_b else held.detach().clone()
        if (read := tensors.get(name)) is not None:
            part = tuple(slice(0, size) for size in read.shape)
            rank = 2 if half_b else 1
            fixed = [axis for axis in range(held.dim()) if axis not in (0, rank)]
            if (
                read.dim() != held.dim()
                or any(read.shape[axis] != held.shape[axis] for axis in fixed)
                or any(read.shape[axis] > held.shape[axis] for axis in (0, rank))
            ):
                raise KTAMXConfigError(
                    f"{folder}: {name} is {tuple(read.shape)}; the model's is {tuple(held.shape)}, of rank {lora.rank}",
                    "lora_rank",
                )
            value[part] = read.to(value) * (factor if half_b else 1.0)
        fitted[name] = value
    return fitted
