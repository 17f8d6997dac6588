"""Random weights of any Qwen3MoE shape, made on the GPU when asked for: a full-size model without files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine.model.config import ModelConfig
from engine.weights.store import ExpertStore, WeightSource, WeightTensor

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu", "vocab_size": 151936,
    "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144,
    "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960,
    "attention_bias": False, "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


class RandomSource(WeightSource):
    """bf16. Layers read the same expert values, but every backend keeps a copy of its own for each."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config = config
        self._device = device
        self._made: dict[str, WeightTensor] = {}

    def _random(self, name: str, *shape: int, cached: bool = False) -> WeightTensor:
        if name in self._made:
            return self._made[name]
        values = torch.randn(shape, device=self._device, dtype=torch.bfloat16)
        values = 1 + values / 10 if len(shape) == 1 else values / shape[-1] ** 0.5
        made = WeightTensor(name, shape, "BF16", values.cpu().view(torch.uint8).numpy().reshape(-1))
        if cached:
            self._made[name] = made
        return made

    def tensor(self, name: str) -> WeightTensor:
        c = self.config
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "embed_tokens": (c.vocab_size, c.hidden_size),
            "lm_head": (c.vocab_size, c.hidden_size),
            "q_proj": (q, c.hidden_size),
            "k_proj": (kv, c.hidden_size),
            "v_proj": (kv, c.hidden_size),
            "o_proj": (c.hidden_size, q),
            "q_norm": (c.head_dim,),
            "k_norm": (c.head_dim,),
            "gate": (c.num_experts, c.hidden_size),
        }
        return self._random(name, *shapes.get(name.split(".")[-2], (c.hidden_size,)))

    def has(self, name: str) -> bool:
        return not name.endswith(".bias")

    def experts(self, layer: int) -> ExpertStore:
        c = self.config
        e, h, i = c.num_experts, c.hidden_size, c.moe_intermediate_size
        shapes = {"gate": (e, i, h), "up": (e, i, h), "down": (e, h, i)}
        parts = {name: self._random(name, *shape, cached=True) for name, shape in shapes.items()}
        return ExpertStore(layer, parts["gate"], parts["up"], parts["down"])

    def names(self) -> list[str]:
        return []

    @property
    def num_bytes(self) -> int:
        return 0

    @property
    def paths(self) -> list[Path]:
        return []
