"""Mixtral (8x7B, 8x22B): routed experts as wide as `intermediate_size`, in every layer. Defaults are those of
transformers' MixtralConfig. llama.cpp keeps it as a `llama` with experts, rows of q and k in its own order."""

from __future__ import annotations

from engine.architectures.base import Architecture
from engine.architectures.config import LayerSpec, ModelConfig
from engine.architectures.fields import Fields
from engine.architectures.gguf import GGUFModel, config_of_gguf
from engine.architectures.hf import Defaults, config_of_hf
from engine.architectures.names import StoredNames
from engine.architectures.numbers import Numbers
from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.mlp import Router, Sparse
from engine.errors import ModelFileError
from rules import Family, named_after

_NAME, _GGUF = "mixtral", "llama"
_STORED = StoredNames(
    (
        ("block_sparse_moe", "mlp"),
        ("experts.*.w1", "experts.*.gate_proj"),
        ("experts.*.w2", "experts.*.down_proj"),
        ("experts.*.w3", "experts.*.up_proj"),
        ("experts.w1", "experts.gate_proj"),  # of all experts, in adapters
        ("experts.w2", "experts.down_proj"),
        ("experts.w3", "experts.up_proj"),
    )
)
_DEFAULTS = Defaults(
    vocab_size=32000,
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=None,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
)


def _read_hf(fields: Fields, generation: Fields) -> ModelConfig:
    window = fields.get("sliding_window")
    positions = fields.integer("max_position_embeddings", _DEFAULTS.max_position_embeddings)
    if window is not None and fields.integer("sliding_window") < positions:
        raise fields.error(
            "sliding_window",
            f"is {window} of {positions} positions; sliding windows cannot be served (null or max_position_embeddings "
            "would be)",
        )
    return config_of_hf(fields, generation, _DEFAULTS, architecture=_NAME, layers=_layers)


def _read_gguf(file: GGUFModel) -> ModelConfig:
    if file.fields.get("expert_count") in (None, 0):
        raise ModelFileError(f"{file.where}: a dense llama model; those with experts can be served", "model")
    if not file.fields.boolean("expert_weights_norm", True):
        raise file.fields.error("expert_weights_norm", "is false; weights of chosen experts are normalised here")
    return config_of_gguf(file, architecture=_NAME, norm_topk_prob=True, layers=_layers, divided=False)


def _layers(n: Numbers) -> tuple[LayerSpec, ...]:
    attention = GroupedQuery(
        n.num_attention_heads, n.num_key_value_heads, n.head_dim, n.rotation, paired_rows=True
    )  # fmt: skip
    width = n.moe_intermediate_size
    sparse = Sparse(n.num_experts, n.num_experts_per_tok, width, Router(), size="intermediate_size")
    return n.layers(attention, sparse)


MIXTRAL = Architecture(
    name=_NAME,
    model_class="MixtralForCausalLM",
    gguf=_GGUF,
    read_hf=_read_hf,
    read_gguf=_read_gguf,
    lora_targets=(*GroupedQuery.TARGETS, *Sparse.TARGETS),
    stored_names=_STORED,
    rules=Family(
        classes={name: kind for name, kind in named_after("Mixtral").items() if kind != "mlp"},
        packages=("transformers.models.mixtral.modeling_mixtral", "ktransformers.models.modeling_mixtral"),
        operators={"ktransformers.operators.experts.KMistralSparseMoEBlock": "moe_block"},
        stored_name=_STORED.stored,
    ),
)
