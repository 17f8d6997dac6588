"""A ModelConfig of any shape, without a model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from engine.architectures.config import LayerSpec, ModelConfig
from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.mlp import Dense, Router, SharedExpert, Sparse
from engine.architectures.parts.rotation import RopeScaling, Rotation


@dataclass
class _Shape:
    """Flat, by the names of transformers' configurations."""

    architecture: str = "qwen3_moe"
    vocab_size: int = 128
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 32
    intermediate_size: int = 64
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = True
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 4096
    attention_bias: bool = False
    qk_norm: bool = True
    tie_word_embeddings: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


def config(**changes: Any) -> ModelConfig:
    """Layers of grouped-query attention with routed experts, or a dense MLP in `mlp_only_layers`."""
    s = _Shape(**changes)
    rotation = Rotation(s.head_dim, s.rope_theta, s.max_position_embeddings, s.rope_scaling)
    attention = GroupedQuery(
        s.num_attention_heads, s.num_key_value_heads, s.head_dim, rotation,
        bias=s.attention_bias, output_bias=s.attention_bias, qk_norm="head" if s.qk_norm else "none",
    )  # fmt: skip
    shared = SharedExpert.of(s.shared_expert_intermediate_size) if s.shared_expert_intermediate_size else None
    router = Router(normalise=0.0 if s.norm_topk_prob else None)
    sparse = Sparse(s.num_experts, s.num_experts_per_tok, s.moe_intermediate_size, router, shared)
    dense = {n for n in range(s.num_hidden_layers) if n in s.mlp_only_layers or (n + 1) % s.decoder_sparse_step}
    mlps = (
        Dense(s.intermediate_size) if n in dense or not s.num_experts else sparse for n in range(s.num_hidden_layers)
    )
    same = {name: getattr(s, name) for name in {f.name for f in fields(ModelConfig)} & set(vars(s))}
    return ModelConfig(**same, layers=tuple(LayerSpec(attention, mlp) for mlp in mlps))
