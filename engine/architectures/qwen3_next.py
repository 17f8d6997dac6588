"""Qwen3-Next and Qwen3-Coder-Next: three of four layers are gated delta nets, the fourth is gated grouped-query
attention with a quarter of each head rotated; routed experts and a shared one behind a sigmoid gate. Norms but those
inside the delta nets are stored less 1. Defaults are those of transformers' Qwen3NextConfig."""

from __future__ import annotations

from engine.architectures.base import Architecture
from engine.architectures.config import ModelConfig
from engine.architectures.delta import DELTA_TARGETS, MTP, delta_config_of_gguf, delta_config_of_hf
from engine.architectures.fields import Fields
from engine.architectures.gguf import GGUFModel
from engine.architectures.hf import Defaults
from engine.architectures.names import StoredNames
from engine.architectures.parts.delta import DeltaNet
from engine.architectures.parts.mlp import Dense
from rules import Family, named_after

_NAME, _GGUF = "qwen3_next", "qwen3next"
_DEFAULTS = Defaults(
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    intermediate_size=5632,
    num_experts=512,
    num_experts_per_tok=10,
    moe_intermediate_size=512,
    norm_topk_prob=True,
    partial_rotary_factor=0.25,
    linear_layers=True,
)
_STORED = StoredNames(DeltaNet.STORED)


def _read_hf(fields: Fields, generation: Fields) -> ModelConfig:
    return delta_config_of_hf(fields, generation, _DEFAULTS, architecture=_NAME, fused=True, left_out=(MTP,))


def _read_gguf(file: GGUFModel) -> ModelConfig:
    return delta_config_of_gguf(file, architecture=_NAME, fused_gates=True)


QWEN3_NEXT = Architecture(
    name=_NAME,
    model_class="Qwen3NextForCausalLM",
    gguf=_GGUF,
    read_hf=_read_hf,
    read_gguf=_read_gguf,
    lora_targets=(*DeltaNet.FUSED_TARGETS, *DELTA_TARGETS, *Dense.TARGETS),
    rules=Family(
        classes=named_after("Qwen3Next") | {"Qwen3NextGatedDeltaNet": "attention"},
        packages=("transformers.models.qwen3_next.modeling_qwen3_next", "ktransformers.models.modeling_qwen3_next"),
        stored_name=_STORED.stored,
    ),
    stored_names=_STORED,
)
