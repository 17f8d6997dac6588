"""Adapters of layers whose projections have another form here than in adapter files, as those of GGUF models have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from engine.architectures.config import ModelConfig
from engine.architectures.parts.delta import DeltaNet
from engine.lora.adapter import LoraPair

_Rows = npt.NDArray[np.intp]


def in_order(linears: dict[str, LoraPair], config: ModelConfig) -> dict[str, LoraPair]:
    """Pairs by the modules and rows of `config`, from those of `config.of_safetensors`."""
    result = dict(linears)
    for index, layer in enumerate(config.layers):
        net = layer.attention
        if isinstance(net, DeltaNet) and net != net.of_safetensors:
            _reorder(result, f"model.layers.{index}.self_attn", net)
    return result


def _reorder(linears: dict[str, LoraPair], at: str, net: DeltaNet) -> None:
    if net.fused_gates and not net.fused and (pair := linears.pop(f"{at}.qkvz_proj", None)) is not None:
        qkv, z = _parted(net)
        linears[f"{at}.qkv_proj"], linears[f"{at}.z_proj"] = _rows(pair, qkv), _rows(pair, z)
    if not net.tiled:
        return
    heads = np.arange(net.value_heads).reshape(net.key_heads, -1).T.reshape(-1)  # whose is each head here
    values = (heads[:, None] * net.value_dim + np.arange(net.value_dim)).reshape(-1)
    keys = 2 * net.key_width
    orders = {
        "qkv_proj": np.concatenate((np.arange(keys), keys + values)),
        "z_proj": values,
        "in_proj_b": heads,
        "in_proj_a": heads,
    }
    for name, order in orders.items():
        if (pair := linears.get(f"{at}.{name}")) is not None:
            linears[f"{at}.{name}"] = _rows(pair, order)
    if (pair := linears.get(f"{at}.out_proj")) is not None:
        linears[f"{at}.out_proj"] = replace(pair, a=pair.a[:, torch.from_numpy(values)])


def _parted(net: DeltaNet) -> tuple[_Rows, _Rows]:
    """Of a projection to q, k, v, z by key heads the rows of [q | k | v], and those of z."""
    shared = net.value_width // net.key_heads
    rows = np.arange(net.channels + net.value_width).reshape(net.key_heads, -1)
    q, k, v, z = np.split(rows, np.cumsum([net.key_dim, net.key_dim, shared]), axis=1)
    return np.concatenate([part.reshape(-1) for part in (q, k, v)]), z.reshape(-1)


def _rows(pair: LoraPair, order: _Rows) -> LoraPair:
    return replace(pair, b=pair.b[torch.from_numpy(order)])
