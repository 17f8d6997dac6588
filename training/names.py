"""What transformers calls a model's modules. Torch-free."""

from __future__ import annotations

from engine.architectures.names import StoredNames
from engine.architectures.parts.delta import GATES, DeltaNet

_NAMES = StoredNames(DeltaNet.STORED)


def transformers_name(name: str) -> str:
    """Of a tensor or module that is named so in `engine.architectures`."""
    return _NAMES.stored(name)


# of delta nets the projections that are computed in float32, as ends of names
GATE_MODULES = tuple(transformers_name(f"model.layers.0.{name}").removeprefix("model.layers.0.") for name in GATES)
