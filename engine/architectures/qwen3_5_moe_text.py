"""Qwen3.5 and 3.6 MoE without a vision tower: layers as Qwen3-Next's, with projections of their own for z, b and a.
Positions of text are the same in all three of mrope's sections. Defaults are those of transformers'
Qwen3_5MoeTextConfig."""

from __future__ import annotations

from engine.architectures.base import Architecture
from engine.architectures.config import ModelConfig
from engine.architectures.delta import DELTA_TARGETS, MTP, delta_config_of_gguf, delta_config_of_hf
from engine.architectures.fields import Fields
from engine.architectures.gguf import GGUFModel
from engine.architectures.hf import Defaults
from engine.architectures.names import StoredNames
from engine.architectures.parts.delta import DeltaNet
from rules import Family, named_after

_NAME, _GGUF = "qwen3_5_moe_text", "qwen35moe"
_DEFAULTS = Defaults(
    hidden_size=2048,
    num_hidden_layers=40,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    intermediate_size=512,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    vocab_size=248320,
    norm_topk_prob=True,
    partial_rotary_factor=0.25,
    linear_layers=True,
)
_STORED = StoredNames(DeltaNet.STORED)
_IGNORED = ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")  # transformers reads none of them here


def read_text(fields: Fields, generation: Fields, name: str) -> ModelConfig:
    """`fields` of the text model, `name` of its record. Raises ModelFileError."""
    values = {key: value for key, value in fields.values.items() if key not in _IGNORED}
    return delta_config_of_hf(
        Fields(values, fields.where), generation, _DEFAULTS, architecture=name, fused=False, left_out=(MTP,)
    )


def _read_hf(fields: Fields, generation: Fields) -> ModelConfig:
    return read_text(fields, generation, _NAME)


def _read_gguf(file: GGUFModel) -> ModelConfig:
    return delta_config_of_gguf(file, architecture=_NAME, fused_gates=False)


QWEN3_5_MOE_TEXT = Architecture(
    name=_NAME,
    model_class="Qwen3_5MoeForCausalLM",
    gguf=_GGUF,
    read_hf=_read_hf,
    read_gguf=_read_gguf,
    lora_targets=(*DeltaNet.TARGETS, *DELTA_TARGETS),
    rules=Family(
        classes=named_after("Qwen3_5Moe") | {"Qwen3_5MoeGatedDeltaNet": "attention"},
        packages=("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",),
        stored_name=_STORED.stored,
    ),
    stored_names=_STORED,
)
