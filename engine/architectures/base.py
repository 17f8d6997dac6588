"""What the engine has to know about a model family. Torch-free.

A family is one `Architecture`, listed in `registry.py`: what its files say, how its tensors are called, and what its
layers are made of (`engine.architectures.parts`). Everything else asks the record, the `ModelConfig` that it reads or
the parts in it, never the family's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.architectures.config import ModelConfig
from engine.architectures.fields import Fields
from engine.architectures.gguf import GGUFModel
from engine.architectures.names import AS_HERE, StoredNames
from engine.architectures.parts.base import Module
from engine.architectures.parts.mlp import ROUTER
from rules import Family


@dataclass(frozen=True)
class Architecture:
    """One model family."""

    name: str  # `model_type` of config.json
    model_class: str  # of `architectures` in config.json
    gguf: str  # `general.architecture`
    read_hf: Callable[[Fields, Fields], ModelConfig]  # config.json, generation_config.json; raises ModelFileError
    read_gguf: Callable[[GGUFModel], ModelConfig]  # raises ModelFileError
    lora_targets: tuple[str, ...]  # modules of a layer that an adapter may change, besides routed experts
    rules: Family  # its module classes, as rules and KTransformers name them
    stored_names: StoredNames = AS_HERE
    other_names: tuple[str, ...] = ()  # of `model_type`, for models that are of the family in all but name
    own_fields: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}  # of config.json, beside the common ones
    of_gguf: Callable[[GGUFModel], bool] = lambda file: True  # of files of one `gguf`, which families may share
    text_of: str = ""  # of a model with more than text: the family that its language model alone is of

    @property
    def language_model(self) -> str:
        """Families of which this is equal are one in GGUF."""
        return self.text_of or self.name

    def canonical(self, stored: str) -> str:
        """The name here of a tensor or module that safetensors or an adapter store under another one."""
        return self.stored_names.canonical(stored)

    def stored(self, canonical: str) -> str:
        """What the family's files call a tensor or module that is named `canonical` here."""
        return self.stored_names.stored(canonical)

    def module_classes(self, config: ModelConfig) -> list[tuple[str, str]]:
        """(name, class) of every module that a rule may place, parents before children."""
        of = self.rules.class_of
        placed = [("model", of("model")), ("model.embed_tokens", of("embedding"))]
        for layer in range(len(config.layers)):
            at = f"model.layers.{layer}"
            placed.append((at, of("layer")))
            placed += [(f"{at}.{module.name}", of(self._kind(module))) for module in config.modules(layer)]
        return [*placed, ("model.norm", of("norm")), ("model.rotary_emb", of("rope")), ("lm_head", of("linear"))]

    def _kind(self, module: Module) -> str:
        return "router" if module.name == ROUTER and self.rules.has_routers else module.kind
