"""One rank's part of an adapter: what its part of the model computes with (engine/ranks/shard.py).

Of y += s (x A^T) B^T a rank that has some outputs has those rows of B, one that has some inputs those columns of A.
"""

from __future__ import annotations

from dataclasses import replace

from engine.architectures.parts.base import BY_INPUTS, BY_OUTPUTS
from engine.lora.adapter import AdapterWeights, ExpertLora, LoraPair
from engine.ranks.shard import Shard


def adapter_part(adapter: AdapterWeights, shard: Shard) -> AdapterWeights:
    """Views of the adapter's tensors. Rank 0 has MLPs that the adapter brings, whole, and experts that are not
    divided."""
    first = shard.rank == 0
    experts = adapter.experts if shard.experts or first else {}
    return replace(
        adapter,
        linears={name: _pair(name, pair, shard) for name, pair in adapter.linears.items()},
        experts={layer: _expert(lora, shard) if shard.experts else lora for layer, lora in experts.items()},
        extra_mlps=adapter.extra_mlps if first else {},
    )


def _pair(name: str, pair: LoraPair, shard: Shard) -> LoraPair:
    if name.endswith(BY_OUTPUTS):
        return replace(pair, b=pair.b[shard.span(pair.b.shape[0])])
    if name.endswith(BY_INPUTS):
        return replace(pair, a=pair.a[:, shard.span(pair.a.shape[1])])
    return pair


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
