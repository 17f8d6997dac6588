"""The model families that can be served, and how a model on disk finds its own. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from engine.architectures.base import Architecture
from engine.architectures.config import ModelConfig
from engine.architectures.deepseek_v2 import DEEPSEEK_V2
from engine.architectures.deepseek_v3 import DEEPSEEK_V3
from engine.architectures.fields import Fields
from engine.architectures.gguf import GGUFModel
from engine.architectures.glm4_moe import GLM4_MOE
from engine.architectures.glm4_moe_lite import GLM4_MOE_LITE
from engine.architectures.gpt_oss import GPT_OSS
from engine.architectures.kimi_k25 import KIMI_K25
from engine.architectures.minimax_m2 import MINIMAX_M2
from engine.architectures.mixtral import MIXTRAL
from engine.architectures.qwen2_moe import QWEN2_MOE
from engine.architectures.qwen3_5_moe import QWEN3_5_MOE
from engine.architectures.qwen3_5_moe_text import QWEN3_5_MOE_TEXT
from engine.architectures.qwen3_moe import QWEN3_MOE
from engine.architectures.qwen3_next import QWEN3_NEXT
from engine.architectures.unserved import why_not
from engine.errors import ModelFileError, shown

_OURS: tuple[Architecture, ...] = (
    QWEN3_MOE, QWEN2_MOE, MIXTRAL, GLM4_MOE, GLM4_MOE_LITE, MINIMAX_M2, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K25,
    QWEN3_NEXT, QWEN3_5_MOE_TEXT, QWEN3_5_MOE,
)  # fmt: skip
PLUGINS = "ktserve.architectures"  # the entry points by which an installed package adds families


@cache
def architectures() -> tuple[Architecture, ...]:
    """Ours, and those that installed packages add: each entry point names an `Architecture`."""
    return (*_OURS, *(point.load() for point in entry_points(group=PLUGINS)))


def architecture_of(config: ModelConfig) -> Architecture:
    """The family that `config` was read by."""
    return next(family for family in architectures() if family.name == config.architecture)


def config_from_hf(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, where: str = "config.json"
) -> ModelConfig:
    """From config.json in the spelling of transformers 4 or 5. `generation` is generation_config.json; its bos and eos
    ids go before the config's. Raises ModelFileError."""
    fields = Fields(config, where)
    kind, classes = fields.get("model_type"), fields.get("architectures", [])
    for family in architectures():
        if kind in (family.name, *family.other_names) and classes in ([], [family.model_class]):
            return family.read_hf(fields, Fields(generation or {}, "generation_config.json"))
    allowed = ", ".join(f"{family.model_class} ({family.name})" for family in architectures())
    why = why_not(kind, [family.name for family in architectures()])
    raise fields.error(
        "architectures", f"is {shown(classes)} with model_type {shown(kind)}; these can be served: {allowed}{why}"
    )


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    types: Collection[str] = (),
    where: str = "GGUF",
) -> ModelConfig:
    """`tensors` are the file's tensor names and C-order shapes, `types` the types that occur (all F32: the model's
    dtype is float32, otherwise bfloat16). Raises ModelFileError."""
    name = metadata.get("general.architecture")
    for family in architectures():
        if name == family.gguf:
            file = GGUFModel(name, metadata, tensors, types, where)
            if family.of_gguf(file):
                return family.read_gguf(file)
    served = list(dict.fromkeys(family.gguf for family in architectures()))
    allowed, why = ", ".join(served), why_not(name, served)
    message = f"{where}: general.architecture is {shown(name)}; these can be served: {allowed}{why}"
    raise ModelFileError(message, "model")
