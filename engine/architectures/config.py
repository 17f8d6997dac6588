"""The numbers of a model; `engine.architectures` reads them from files. Torch-free."""

from __future__ import annotations

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
class Quantisation:
    """How safetensors hold quantised weights: `method` "fp8", "gptq" or "awq"."""

    method: str
    group: int  # values of a row that share a scale; -1: all
    rows: int = 1  # rows that share it
    zeros_less_one: bool = False  # zero points are stored so


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of attention and MLPs, dense or of routed experts. Field names are those of transformers' configs.

    Routing is a softmax over all experts' logits, of which the `num_experts_per_tok` largest are taken, renormalised to
    a sum of 1 if `norm_topk_prob`."""

    architecture: str  # the name of its record in `engine.architectures`
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
    attention_bias: bool  # of q, k and v; of o too where the architecture has it
    qk_norm: bool  # an RMS norm of every head's query and key, before rotation
    tie_word_embeddings: bool
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    shared_expert_intermediate_size: int = 0  # of the expert beside the routed ones, behind a sigmoid gate; 0: none
    dtype: str = "bfloat16"
    quantisation: Quantisation | None = None  # of the folder's safetensors

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

    def kv_bytes_per_token(self, element_bytes: int, scale_bytes: int = 0) -> int:
        """`scale_bytes`: of each head's key, and value, beside its elements."""
        head = self.head_dim * element_bytes + scale_bytes
        return 2 * self.num_hidden_layers * self.num_key_value_heads * head
