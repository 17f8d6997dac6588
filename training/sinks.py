"""Attention whose heads have sinks, by torch's fused kernels, which know none."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from training.memory.costs import SINK_VALUES


def sink_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """q [B, H, T, D], k, v [B, G, C, D], sinks [H] -> [B, H, T, D], differentiable in q, k, v and sinks. `mask`
    [B, 1, T, C]: bool, or added to the scores; None: causal, T is C or 1.

    A sink is a key before the others whose value is zero: vectors have one more value, 1 in that key, 0 in other keys
    and sink / scale in queries. So that it is seen without a mask, a query goes before the others as well.
    """
    heads, length, width = q.shape[1:]
    causal = mask is None and length > 1
    sink = (sinks / scale).to(q.dtype)[None, :, None, None].expand(q.shape[0], -1, length, 1)
    q = F.pad(torch.cat((q, sink), -1), (0, SINK_VALUES - 1, int(causal), 0))
    k, v = (F.pad(part, (0, SINK_VALUES, 1, 0)) for part in (k, v))
    k[..., 0, width] = 1.0
    if mask is not None:
        mask = F.pad(mask, (1, 0), value=mask.dtype == torch.bool)
        k, v = (part.repeat_interleave(heads // k.shape[1], dim=1) for part in (k, v))  # a GPU wants it with masks
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=mask is None
    )
    return out[:, :, int(causal) :, :width]
