"""One rank's part of an adapter: what its part of the model computes with (engine/ranks/shard.py).

Of y += s (x A^T) B^T a rank that has some outputs has those rows of B, one that has some inputs those columns of A.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.architectures.config import ModelConfig
from engine.architectures.parts.base import BY_INPUTS, BY_OUTPUTS
from engine.lora.adapter import AdapterWeights, ExpertLora, LoraPair
from engine.ranks.heads import Spans, column_spans, delta_of, row_spans
from engine.ranks.shard import Shard


def adapter_part(adapter: AdapterWeights, shard: Shard, config: ModelConfig) -> AdapterWeights:
    """Views of the adapter's tensors, copies where a rank's rows do not follow one another. `config`: of the whole
    model. Rank 0 has MLPs that the adapter brings, whole, and experts that are not divided."""
    first = shard.rank == 0
    experts = adapter.experts if shard.experts or first else {}
    return replace(
        adapter,
        linears={name: _pair(name, pair, shard, config) for name, pair in adapter.linears.items()},
        experts={layer: _expert(lora, shard) if shard.experts else lora for layer, lora in experts.items()},
        extra_mlps=adapter.extra_mlps if first else {},
    )


def _pair(name: str, pair: LoraPair, shard: Shard, config: ModelConfig) -> LoraPair:
    if (net := delta_of(config, name)) is not None:
        rows = row_spans(net, name, shard.rank, shard.size)
        columns = column_spans(net, name, shard.rank, shard.size)
    else:
        rows = (shard.span(pair.b.shape[0]),) if name.endswith(BY_OUTPUTS) else None
        columns = (shard.span(pair.a.shape[1]),) if name.endswith(BY_INPUTS) else None
    if rows is not None:
        pair = replace(pair, b=_joined(pair.b, rows, 0))
    return pair if columns is None else replace(pair, a=_joined(pair.a, columns, 1))


def _joined(x: torch.Tensor, spans: Spans, dim: int) -> torch.Tensor:
    parts = [x.narrow(dim, span.start, span.stop - span.start) for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _expert(lora: ExpertLora, shard: Shard) -> ExpertLora:
    if shard.whole_experts:
        some = shard.span(lora.gate_a.shape[0])
        matrices = ("gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")
        return replace(lora, **{name: getattr(lora, name)[some].contiguous() for name in matrices})
    inner = shard.span(lora.down_a.shape[2])
    return replace(
        lora,
        gate_b=lora.gate_b[:, inner].contiguous(),
        up_b=lora.up_b[:, inner].contiguous(),
        down_a=lora.down_a[:, :, inner].contiguous(),
    )
