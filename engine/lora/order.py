"""Adapters of layers whose projections have another form here than in adapter files, as those of GGUF models have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.architectures.config import ModelConfig
from engine.architectures.parts.delta import DeltaNet
from engine.lora.adapter import LoraPair


@dataclass(frozen=True)
class Stored:
    """Where the pair of a module comes from: the module `name` of adapters, of its B some `rows`, of its A some
    `columns`, both int64; None: all, as they are."""

    name: str
    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None

    def taken(self, pair: LoraPair) -> LoraPair:
        """Differentiable."""
        a = pair.a if self.columns is None else pair.a[:, self.columns]
        return replace(pair, a=a, b=pair.b if self.rows is None else pair.b[self.rows])


def in_order(linears: dict[str, LoraPair], config: ModelConfig) -> dict[str, LoraPair]:
    """Pairs by the modules and rows of `config`, from those of `config.of_safetensors`."""
    others = stored_modules(config)
    names = {stored.name for stored in others.values()}
    result = {name: pair for name, pair in linears.items() if name not in names}
    return result | {
        name: stored.taken(linears[stored.name]) for name, stored in others.items() if stored.name in linears
    }


def stored_modules(config: ModelConfig) -> dict[str, Stored]:
    """By name the modules of `config` that have another form in `config.of_safetensors`, and what they are there."""
    found: dict[str, Stored] = {}
    for index, layer in enumerate(config.layers):
        net = layer.attention
        if isinstance(net, DeltaNet) and net != net.of_safetensors:
            at = f"model.layers.{index}.self_attn"
            found |= {f"{at}.{name}": replace(of, name=f"{at}.{of.name}") for name, of in _stored(net)}
    return found


def _stored(net: DeltaNet) -> Iterator[tuple[str, Stored]]:
    if net.fused_gates and not net.fused:
        for name, rows in zip(("qkv_proj", "z_proj"), _parted(net), strict=True):
            yield name, Stored("qkvz_proj", rows)
    if not net.tiled:
        return
    heads = np.arange(net.value_heads).reshape(net.key_heads, -1).T.reshape(-1)  # whose is each head here
    values = (heads[:, None] * net.value_dim + np.arange(net.value_dim)).reshape(-1)
    keys = 2 * net.key_width
    yield "qkv_proj", Stored("qkv_proj", torch.from_numpy(np.concatenate((np.arange(keys), keys + values))))
    yield "z_proj", Stored("z_proj", torch.from_numpy(values))
    for gate in ("in_proj_b", "in_proj_a"):
        yield gate, Stored(gate, torch.from_numpy(heads))
    yield "out_proj", Stored("out_proj", columns=torch.from_numpy(values))


def _parted(net: DeltaNet) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a projection to q, k, v, z by key heads the rows of [q | k | v], and those of z."""
    shared = net.value_width // net.key_heads
    rows = torch.arange(net.channels + net.value_width).view(net.key_heads, -1)
    q, k, v, z = (part.reshape(-1) for part in torch.split(rows, [net.key_dim, net.key_dim, shared, shared], 1))
    return torch.cat((q, k, v)), z
