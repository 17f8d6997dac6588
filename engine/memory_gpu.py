"""What a GPU has, and what the engine takes of it besides weights and KV."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.flashinfer import WORKSPACE_BYTES
from engine.config import EngineConfig
from engine.graphs import bucket_sizes
from engine.linear.gpu import padded_rank
from engine.memory_costs import dense_bytes
from engine.memory_limits import Memory
from engine.memory_plan import Item
from engine.memory_units import parse_bytes
from engine.model_config import ModelConfig
from engine.weights.store import WeightSource

_PLAN_BYTES = 8 << 20  # flashinfer's arrays of one decode size
_GRAPH_BYTES = 24 << 20  # of one CUDA graph: its nodes and its part of the shared pool
_F32 = 4
_HOT_SHARE = 0.6  # the KV cache comes out of the rest


def gpu_memory(device: str) -> Memory:
    """Free and total bytes of "cuda" or "cuda:N"."""
    index = int(device.partition(":")[2] or 0)
    free, total = torch.cuda.mem_get_info(index)
    return Memory(f"GPU {index}", free, total)


def gpu_items(config: EngineConfig, model: ModelConfig, element_bytes: int, device: str = "cuda") -> list[Item]:
    """Workspaces, CUDA graphs and the adapters' slot tables. Experts' adapters lie with their experts."""
    name = f"GPU {int(device.partition(':')[2] or 0)}"
    sizes = len(bucket_sizes(config.max_num_seqs))
    items = [Item(name, "attention workspace", WORKSPACE_BYTES + (sizes + 1) * _PLAN_BYTES)]
    if config.cuda_graphs == "auto":
        families = 2 if config.max_adapter_slots else 1
        items.append(Item(name, f"CUDA graphs, {families} x {sizes} sizes", families * sizes * _GRAPH_BYTES))
    if config.max_adapter_slots:
        tables = slot_table_bytes(config, model, element_bytes)
        items.append(Item(name, f"adapter slots, {config.max_adapter_slots} x rank {config.max_adapter_rank}", tables))
    return items


def streaming_item(model: ModelConfig, element_bytes: int, device: str) -> Item:
    """Two layers' experts, and a slice of one as the CPU packs it."""
    layer = model.num_experts * 3 * model.hidden_size * model.moe_intermediate_size * element_bytes
    return Item(f"GPU {int(device.partition(':')[2] or 0)}", "prefill streaming, 2 layers", 2 * layer + layer // 8)


def hot_expert_bytes(config: EngineConfig, source: WeightSource, gpu: Memory, items: Sequence[Item]) -> int:
    """GPU memory for hybrid experts: what was asked for, or a share of what dense weights and `items` leave free, at
    most what all experts take."""
    if config.gpu_expert_memory is not None:
        return parse_bytes(config.gpu_expert_memory, "gpu_expert_memory")
    model, element = source.config, 4 if config.dtype == "float32" else 2
    used = dense_bytes(source, "gpu", element) + sum(item.num_bytes for item in items)
    every = len(model.sparse_layers) * model.num_experts * 3 * model.hidden_size * model.moe_intermediate_size * element
    return min(int(_HOT_SHARE * max(gpu.free_bytes - used, 0)), every)


def slot_table_bytes(config: EngineConfig, model: ModelConfig, element_bytes: int) -> int:
    """Slot tables of attention, dense MLPs (activations' type) and routers (float32)."""
    rank, hidden = padded_rank(config.max_adapter_rank), model.hidden_size
    q, kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    attention = (hidden * 3 + q + 2 * kv) + (q + hidden)
    dense = 3 * (hidden + model.intermediate_size)
    router = hidden + model.num_experts
    sparse = len(model.sparse_layers)
    narrow = model.num_hidden_layers * attention + (model.num_hidden_layers - sparse) * dense
    return (config.max_adapter_slots + 1) * rank * (narrow * element_bytes + sparse * router * _F32)
