"""What attention of transformers' models is here beyond its own: with sinks by fused kernels, and windows of packed
rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from training.sinks import sink_attention

SINK_ATTENTION = "causal_with_sinks"  # its name in transformers


def within_windows(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Transformers takes a mask [B, 1, S, S], of packed rows, for that of all layers: those with a window get their
    own."""
    config: Any = module.config
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4:
        return args, kwargs
    unseen = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril(-config.sliding_window)
    lowest = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    masks = {"full_attention": mask, "sliding_attention": mask.masked_fill(unseen, lowest)}
    return args, {**kwargs, "attention_mask": masks}


def _forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    s_aux: torch.Tensor,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it; windows are in the mask."""
    out = sink_attention(query, key, value, s_aux, scale=scaling, mask=attention_mask, dropout=dropout)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(SINK_ATTENTION, _forward)
AttentionMaskInterface.register(SINK_ATTENTION, sdpa_mask)
