"""Tiny models for training: ours, with the experts behind the contract, and transformers' own with stock PEFT."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from engine.weights.store import WeightSource
from training.config.fields import DELTA_TARGETS
from training.experts.base import TrainableExperts
from training.experts.reference import ReferenceExperts
from training.layer import ExpertsLoraLayer, lora_config, with_lora
from training.loop.progress import read_log
from training.model import ExpertMaker, load_model

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def reference(source: WeightSource, dtype: torch.dtype) -> dict[int, TrainableExperts]:
    return {layer: ReferenceExperts.from_store(source.experts(layer)) for layer in source.config.sparse_layers}


def within_kimi(folder: Path) -> None:
    """A folder of DeepSeek V3 becomes one of Kimi K2.5, with a tensor of its vision tower."""
    text = json.loads((folder / "config.json").read_text()) | {"model_type": "kimi_k2"}
    whole = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(whole))
    file = folder / "model.safetensors"
    stored = {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    save_file(stored | {"vision_tower.patch_embed.weight": torch.zeros(2, 2)}, file)


def ours(
    folder: Path,
    make: ExpertMaker = reference,
    *,
    targets: tuple[str, ...] = ("all",),
    seed: int = 0,
    rank: int = 4,
    **load: Any,
) -> PeftModel:
    """The folder's model with an adapter of alpha 8, B zero."""
    base = load_model(str(folder), make, **load)
    torch.manual_seed(seed)
    return with_lora(base, lora_config(base, targets, rank=rank, alpha=8))


class Expert(nn.Module):
    """As transformers 4 had experts: three linear layers, which PEFT takes as it takes any."""

    def __init__(self, fused: nn.Module, index: int) -> None:
        super().__init__()
        gate_up, down = fused.gate_up_proj[index], fused.down_proj[index]
        gate_up_bias, down_bias = (getattr(fused, f"{name}_proj_bias", None) for name in ("gate_up", "down"))
        self.limit, self.alpha = getattr(fused, "limit", None), getattr(fused, "alpha", None)
        biases = (None, None, None)
        if gate_up_bias is None:
            gate, up = gate_up.chunk(2)
        else:  # gpt-oss: inputs before outputs, gate and up by turns
            gate, up, down = gate_up[:, ::2].T, gate_up[:, 1::2].T, down.T
            biases = (gate_up_bias[index, ::2], gate_up_bias[index, 1::2], down_bias[index])
        for name, weight, bias in zip(PROJECTIONS, (gate, up, down), biases, strict=True):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
            linear.weight = nn.Parameter(weight.clone())
            if bias is not None:
                linear.bias = nn.Parameter(bias.clone())
            self.add_module(name, linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.limit is None:
            return self.down_proj(nn.functional.silu(gate) * up)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.down_proj((up + 1) * gate * torch.sigmoid(self.alpha * gate))


class Experts(nn.ModuleList):
    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for index, expert in enumerate(self):
            rows, choice = torch.where(ids == index)
            out = out.index_add(0, rows, expert(hidden[rows]) * weights[rows, choice, None])
        return out


def plain(model: PreTrainedModel, rank: int = 4) -> PeftModel:
    """Transformers' model with PEFT's own LoRA on every projection of attention and experts."""
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        fused = layer.mlp.experts
        layer.mlp.experts = Experts(Expert(fused, index) for index in range(len(fused.down_proj)))
    model.config.model_type = "unfused"  # else PEFT looks for fused experts
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", *DELTA_TARGETS, *PROJECTIONS]
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))


@torch.no_grad()
def copy_lora(source: PeftModel, target: PeftModel) -> None:
    """A plain model gets the matrices of one of ours."""
    modules = dict(target.named_modules())
    for name, module in source.named_modules():
        if isinstance(module, ExpertsLoraLayer):
            for index in range(module.base_layer.shape[0]):
                for projection in PROJECTIONS:
                    into = modules[f"{name}.{index}.{projection}"]
                    for half in "ab":
                        matrix = module.lora("default").get_parameter(f"{projection[:-5]}_lora_{half}")
                        getattr(into, f"lora_{half.upper()}")["default"].weight.copy_(matrix[index])
        elif hasattr(module, "lora_A") and "default" in module.lora_A:
            for half in ("lora_A", "lora_B"):
                getattr(modules[name], half)["default"].weight.copy_(getattr(module, half)["default"].weight)


@torch.no_grad()
def draw_b(model: PeftModel, seed: int = 1, scale: float = 0.05) -> PeftModel:
    """B other than zero, so that the adapter does something."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or name.endswith("lora_b"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def losses(folder: Path) -> list[float]:
    """Of a run's log, in the order of its steps."""
    return [record["loss"] for record in read_log(folder / "log.jsonl") if "loss" in record]
