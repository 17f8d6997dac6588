"""Random bf16 values of a model's shape, drawn on the GPU where there is one."""

from __future__ import annotations

import torch

from engine.architectures.config import ModelConfig
from engine.lora.adapter import ExpertLora
from engine.weights.packed import QUANTISED_FORMATS
from engine.weights.store import ExpertStore, WeightTensor
from engine.weights.tiled.panels import PANEL, panel_bytes

DRY = {  # instead of its own sizes, where only the way through a benchmark is to be shown
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": 512, "max_position_embeddings": 8192,
}  # fmt: skip
LORA_RANK = 16


def expert_bytes(config: ModelConfig, quantise: str | None = None) -> int:
    """What the CPU reads of one expert, in bf16 or as --quantise makes it."""
    form, h, i = QUANTISED_FORMATS.get(quantise or "", "bf16"), config.hidden_size, config.moe_intermediate_size
    return (2 * i * panel_bytes(form, h) + h * panel_bytes(form, i)) // PANEL


def random_values(*shape: int) -> torch.Tensor:
    """In host memory, with a standard deviation of 1 / sqrt(the last dimension)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values: torch.Tensor = torch.randn(shape, device=device, dtype=torch.bfloat16) / shape[-1] ** 0.5
    return values.cpu()


def random_store(layer: int, config: ModelConfig) -> ExpertStore:
    e, h, i = config.num_experts, config.hidden_size, config.moe_intermediate_size
    shapes = {"gate": (e, i, h), "up": (e, i, h), "down": (e, h, i)}
    parts = {name: random_values(*shape).view(torch.uint8).numpy().reshape(-1) for name, shape in shapes.items()}
    return ExpertStore(layer, *(WeightTensor(name, shapes[name], "BF16", raw) for name, raw in parts.items()))


def random_lora(config: ModelConfig, rank: int = LORA_RANK) -> ExpertLora:
    """On all experts of a layer."""
    e, h, i, t = config.num_experts, config.hidden_size, config.moe_intermediate_size, random_values
    return ExpertLora(
        t(e, rank, h), t(e, i, rank), t(e, rank, h), t(e, i, rank), t(e, rank, i), t(e, h, rank), 1.0, 1.0, 1.0
    )
