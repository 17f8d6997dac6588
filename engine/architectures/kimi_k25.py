"""Kimi K2.5 and K2.6: a vision tower, which is left out, before a text model with the layers of DeepSeek V3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine.architectures.base import Architecture
from engine.architectures.config import ModelConfig
from engine.architectures.deepseek_v3 import DEEPSEEK_V3, read_layers
from engine.architectures.fields import Fields
from engine.architectures.names import StoredNames
from engine.errors import shown

_NAME = "kimi_k25"
_STORED = StoredNames((("language_model.model", "model"), ("language_model.lm_head", "lm_head")))


def _read_hf(fields: Fields, generation: Fields) -> ModelConfig:
    """The text model has a configuration of its own."""
    text = fields.get("text_config")
    if not isinstance(text, Mapping):
        raise fields.error("text_config", f"is {shown(text)}; allowed is an object")
    shared = {name: fields.values[name] for name in ("quantization_config",) if name in fields.values}
    return read_layers(Fields({**shared, **text}, f"{fields.where}: text_config"), generation, _NAME)


KIMI_K25 = Architecture(
    name=_NAME,
    model_class="KimiK25ForConditionalGeneration",
    gguf=DEEPSEEK_V3.gguf,
    read_hf=_read_hf,
    read_gguf=DEEPSEEK_V3.read_gguf,
    of_gguf=lambda file: False,  # llama.cpp makes no difference
    text_of=DEEPSEEK_V3.name,
    own_fields=DEEPSEEK_V3.own_fields,
    lora_targets=DEEPSEEK_V3.lora_targets,
    stored_names=_STORED,
    rules=replace(DEEPSEEK_V3.rules, stored_name=_STORED.stored),
)
