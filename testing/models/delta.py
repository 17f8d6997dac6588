"""Tensors of models with gated delta nets as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedConfig

Change = Callable[[torch.Tensor], torch.Tensor]

GGUF_PARTS = {
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
}
GGUF_VECTORS = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}


def tiled_heads(x: torch.Tensor, config: PreTrainedConfig, size: int, dim: int = 0, back: bool = False) -> torch.Tensor:
    """Value heads of `size` rows along `dim`, behind whatever comes first: from heads that share a key next to each
    other to llama.cpp's order, in which value head h has key head h % key_heads; or `back`."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    first, heads = torch.split(x, [x.shape[dim] - values * size, values * size], dim)
    by_key = (values // keys, keys) if back else (keys, values // keys)
    order = torch.arange(values).reshape(by_key).T.reshape(-1)
    places = (order[:, None] * size + torch.arange(size)).reshape(-1)
    return torch.cat((first, heads.index_select(dim, places)), dim)


def by_kind(qkvz: torch.Tensor, config: PreTrainedConfig) -> list[torch.Tensor]:
    """Rows by key heads [q, k, v, z] -> all of q, k, v and z, as views [key_heads, rows of one, in]."""
    shared = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    sizes = [config.linear_key_head_dim, config.linear_key_head_dim, shared, shared]
    return list(torch.split(qkvz.view(config.linear_num_key_heads, -1, qkvz.shape[1]), sizes, 1))


def changes(name: str, config: PreTrainedConfig) -> tuple[Change, Change]:
    """How a parameter becomes what the file has, and back."""
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return lambda x: x + 1, lambda x: x - 1
    there, back = _order(name, config, False), _order(name, config, True)
    if name.endswith("A_log"):
        return lambda x: there(-x.exp()), lambda x: back((-x).log())
    if name.endswith("conv1d.weight"):
        return lambda x: there(x[:, 0]), lambda x: back(x)[:, None]
    return there, back


def _order(name: str, config: PreTrainedConfig, back: bool) -> Change:
    """Qwen3-Next keeps the order of heads."""
    sizes = {"in_proj_qkv": config.linear_value_head_dim, "in_proj_z": config.linear_value_head_dim}
    sizes |= {"conv1d": config.linear_value_head_dim, "in_proj_b": 1, "in_proj_a": 1, "A_log": 1, "dt_bias": 1}
    part = next((part for part in name.split(".") if part in sizes or part == "out_proj"), None)
    if config.model_type == "qwen3_next" or part is None:
        return lambda x: x
    if part == "out_proj":
        return lambda x: tiled_heads(x, config, config.linear_value_head_dim, dim=1, back=back)
    size = sizes[part]
    return lambda x: tiled_heads(x, config, size, back=back)
