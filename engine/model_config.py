"""The architecture's numbers, from a Hugging Face config.json or from GGUF metadata. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RopeScaling:
    """`kind` "linear", "dynamic" or "yarn", as transformers names them; the rest as in its rope_parameters."""

    kind: str
    factor: float
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelConfig:
    """Qwen3MoE. Field names are those of transformers' Qwen3MoeConfig."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    intermediate_size: int  # of dense layers
    norm_topk_prob: bool
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    attention_bias: bool
    tie_word_embeddings: bool
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    architecture: str = "Qwen3MoeForCausalLM"
    dtype: str = "bfloat16"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """From config.json and generation_config.json of transformers 4 or 5. Raises ModelFileError."""
        from engine.weights.config.hf import config_from_hf

        return config_from_hf(config, generation)

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], types: Collection[str] = ()
    ) -> ModelConfig:
        """From GGUF metadata, the tensors' C-order shapes and the types that occur. Raises ModelFileError."""
        from engine.weights.config.gguf import config_from_gguf

        return config_from_gguf(metadata, tensors, types)

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has routed experts; otherwise it is a dense MLP of `intermediate_size`."""
        if layer in self.mlp_only_layers or self.num_experts == 0:
            return False
        return (layer + 1) % self.decoder_sparse_step == 0

    @property
    def stretched_positions(self) -> int:
        """Positions that rope scaling reaches: factor times the original length, at least the configured length."""
        scaling = self.rope_scaling
        if scaling is None or scaling.original_max_position_embeddings is None:
            return self.max_position_embeddings
        return max(self.max_position_embeddings, int(scaling.factor * scaling.original_max_position_embeddings))

    @property
    def sparse_layers(self) -> list[int]:
        return [layer for layer in range(self.num_hidden_layers) if self.is_sparse(layer)]

    @property
    def expert_params_per_token(self) -> int:
        """Parameters of routed experts that one token reads, all layers."""
        return len(self.sparse_layers) * self.num_experts_per_tok * 3 * self.hidden_size * self.moe_intermediate_size

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * element_bytes
