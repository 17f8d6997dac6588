"""What a GPU has, and what the engine takes of it besides weights and KV."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.flashinfer import WORKSPACE_BYTES
from engine.config import EngineConfig
from engine.experts.gpu_compute import GpuCompute
from engine.experts.gpu_layout import Sizes
from engine.linear.gpu import padded_rank
from engine.memory_costs import buffer_bytes, dense_bytes
from engine.memory_limits import Memory
from engine.memory_plan import Item
from engine.memory_units import parse_bytes
from engine.model_config import ModelConfig
from engine.step_inputs import bucket_sizes
from engine.weights.store import WeightSource

_PLAN_BYTES = 8 << 20  # flashinfer's arrays of one wrapper, on the GPU and again pinned on the CPU
_PREFILL_WRAPPERS = 2  # fa2's and fa3's
_TYPICAL_RANK = 16
_GRAPH_BYTES = 24 << 20  # of one CUDA graph: its nodes and its part of the shared pool
_F32 = 4
_CPU = "CPU"
_HOT_SHARE = 0.6  # the KV cache comes out of the rest


def gpu_memory(device: str) -> Memory:
    """Free and total bytes of "cuda" or "cuda:N"."""
    index = int(device.partition(":")[2] or 0)
    free, total = torch.cuda.mem_get_info(index)
    return Memory(f"GPU {index}", free, total)


def gpu_items(
    config: EngineConfig, model: ModelConfig, element_bytes: int, device: str = "cuda", attention: str = "flashinfer"
) -> list[Item]:
    """Workspaces, CUDA graphs and the adapters' slot tables; pinned twins on the CPU."""
    name = _name(device)
    sizes = len(bucket_sizes(config.max_num_seqs))
    items = []
    if attention == "flashinfer":
        arrays = (sizes + _PREFILL_WRAPPERS) * _PLAN_BYTES
        items.append(Item(name, "attention workspace", WORKSPACE_BYTES + arrays))
        items.append(Item(_CPU, "attention plans, pinned", arrays))
    if config.cuda_graphs == "auto":
        families = 2 if config.max_adapter_slots else 1
        items.append(Item(name, f"CUDA graphs, {families} x {sizes} sizes", families * sizes * _GRAPH_BYTES))
    if config.max_adapter_slots:
        tables = slot_table_bytes(config, model, element_bytes)
        items.append(Item(name, f"adapter slots, {config.max_adapter_slots} x rank {config.max_adapter_rank}", tables))
    return items


def expert_items(
    config: EngineConfig,
    model: ModelConfig,
    element_bytes: int,
    device: str,
    backends: Sequence[str],
    streams: bool,
) -> list[Item]:
    """What experts need beside their weights: scratch memory of those that a GPU computes, the rows' pinned twins of
    those that the CPU computes, and (`streams`) two layers that are on their way to the GPU."""
    name, rows, items = _name(device), max(config.batched_tokens, config.max_num_seqs), []
    if not model.sparse_layers:
        return []
    if streams or {"gpu", "hybrid"} & set(backends):
        scratch = GpuCompute.planned_bytes(Sizes.of(model), element_bytes, rows, config.max_adapter_rank)
        scratch += rows * model.hidden_size * _F32 if "hybrid" in backends else 0
        items.append(Item(name, "expert scratch", scratch))
    if {"native", "hybrid", "kt"} & set(backends):
        row = 2 * model.hidden_size * element_bytes + model.num_experts_per_tok * 12 + 4
        items.append(Item(_CPU, f"expert rows, {rows}, pinned", rows * row))
    if streams:
        items.append(streaming_item(model, element_bytes, device))
        if config.max_adapter_slots:
            rank = min(_TYPICAL_RANK, config.max_adapter_rank)
            blocks = 2 * config.max_adapter_slots * Sizes.of(model).lora_block(rank) * model.num_experts
            label = f"their LoRA, {config.max_adapter_slots} x rank {rank}"
            items.append(Item(name, label, blocks * element_bytes))
    return items


def adapter_copies(backends: Sequence[str], streams: bool, device: str = "cuda") -> dict[str, int]:
    """How often an adapter in a slot is held on each device beside what was read of it: by the CPU's experts, pinned
    for the GPU's, on the GPU. Attention's and routers' slot tables are counted apart: nearly all of an adapter is its
    experts'."""
    on_cpu = bool({"native", "hybrid", "kt", "reference"} & set(backends))
    copies = {_CPU: on_cpu + (streams or "hybrid" in backends)}
    return copies | ({_name(device): 1} if "gpu" in backends else {})


def halves_items(config: EngineConfig, device: str) -> list[Item]:
    """Two half-batches in turn, at most: with `auto` only sizes at which they can pay are captured."""
    sizes = len(bucket_sizes(config.max_num_seqs)) - 1  # one row has no halves
    if config.ping_pong == "off" or config.cuda_graphs != "auto" or not sizes:
        return []
    families = 2 if config.max_adapter_slots else 1
    plans, label = 2 * sizes * _PLAN_BYTES, f"half-batches, up to {families} x {sizes} sizes"
    return [
        Item(_name(device), f"CUDA graphs of {label}", sizes * families * _GRAPH_BYTES + plans),
        Item(_CPU, f"attention plans of {label}, pinned", plans),
    ]


def streaming_item(model: ModelConfig, element_bytes: int, device: str) -> Item:
    """Two layers' experts, and a slice of one as the CPU packs it."""
    layer = model.num_experts * 3 * model.hidden_size * model.moe_intermediate_size * element_bytes
    return Item(_name(device), "prefill streaming, 2 layers", 2 * layer + layer // 8)


def _name(device: str) -> str:
    return f"GPU {int(device.partition(':')[2] or 0)}"


def hot_expert_bytes(config: EngineConfig, source: WeightSource, gpu: Memory, items: Sequence[Item]) -> int:
    """GPU memory for hybrid experts: what was asked for, or a share of what dense weights and `items` leave free, at
    most what all experts take."""
    if config.gpu_expert_memory is not None:
        return parse_bytes(config.gpu_expert_memory, "gpu_expert_memory")
    model, element = source.config, 4 if config.dtype == "float32" else 2
    used = dense_bytes(source, "gpu", element) + sum(item.num_bytes for item in items if item.device == gpu.name)
    used += buffer_bytes(model, config.batched_tokens, config.max_num_seqs)
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
