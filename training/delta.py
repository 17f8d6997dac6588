"""Layers of gated delta nets in a transformers model: values of their tensors, and what they cannot be trained with."""

from __future__ import annotations

import torch

from engine.errors import ModelFileError, UserError
from engine.weights.gguf import GGUFSource
from engine.weights.layout import Tensor
from engine.weights.store import WeightSource


def refuse_delta(source: WeightSource, model: str, packing: bool) -> None:
    """What a model with states cannot be trained from or with: ModelFileError, UserError."""
    if not source.config.state_bytes:
        return
    if isinstance(source, GGUFSource):
        raise ModelFileError(
            f"{model}: a GGUF file has the rows of linear attention in another order than transformers' model: train "
            "over the folder with safetensors",
            "model_name_or_path",
        )
    if packing:
        raise UserError(
            "packing: layers of linear attention carry one sample's state into the next: set it to false",
            "packing",
        )


def transformers_tensor(tensor: Tensor, values: torch.Tensor, norms_minus_one: bool) -> torch.Tensor:
    """`values` as they are used -> as transformers' parameter has them, float32."""
    if tensor.negative_log:
        return (-values.float()).log()
    return values.float() - 1 if norms_minus_one and tensor.is_norm else values
