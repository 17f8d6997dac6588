"""Qwen3.5 and 3.6 MoE as they are published: a vision tower, which is left out, before the text model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine.architectures.config import ModelConfig
from engine.architectures.fields import Fields
from engine.architectures.names import StoredNames
from engine.architectures.parts.delta import DeltaNet
from engine.architectures.qwen3_5_moe_text import QWEN3_5_MOE_TEXT, read_text
from engine.errors import shown

_NAME = "qwen3_5_moe"
_STORED = StoredNames((("model.language_model", "model"), *DeltaNet.STORED))


def _read_hf(fields: Fields, generation: Fields) -> ModelConfig:
    """The text model has a configuration of its own."""
    text = fields.get("text_config")
    if not isinstance(text, Mapping):
        raise fields.error("text_config", f"is {shown(text)}; allowed is an object")
    above = ("quantization_config", "tie_word_embeddings")
    shared = {name: fields.values[name] for name in above if name in fields.values}
    return read_text(Fields({**text, **shared}, f"{fields.where}: text_config"), generation, _NAME)


QWEN3_5_MOE = replace(
    QWEN3_5_MOE_TEXT,
    name=_NAME,
    model_class="Qwen3_5MoeForConditionalGeneration",
    read_hf=_read_hf,
    of_gguf=lambda file: False,  # llama.cpp makes no difference
    text_of=QWEN3_5_MOE_TEXT.name,
    stored_names=_STORED,
    rules=replace(QWEN3_5_MOE_TEXT.rules, stored_name=_STORED.stored),
)
