"""What a GPU has, and what the engine takes of it besides weights and KV."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.architectures.config import LayerSpec, ModelConfig
from engine.architectures.parts.mla import Latent
from engine.attention.flashinfer import WORKSPACE_BYTES, plan_bytes
from engine.attention.flashinfer_expanded import expands_from, piece_bytes
from engine.config import EngineConfig, bucket_sizes
from engine.experts.base import ExpertBuffers
from engine.experts.gpu.compute import GpuCompute
from engine.experts.gpu.layout import Elementwise, Sizes
from engine.experts.hybrid.backend import HybridExperts
from engine.experts.streamed.backend import StreamedExperts
from engine.experts.streamed.layers import LayerStream
from engine.linear.gpu import slot_table_bytes
from engine.memory.costs import TYPICAL_RANK
from engine.memory.items import Item, Kind
from engine.memory.limits import Memory
from engine.planning.drafts import padded_rows

_GRAPH_BYTES = 24 << 20  # of one CUDA graph: its nodes and its part of the shared pool
_F32 = 4
_CPU = "CPU"
_HOT_SHARE = 0.6  # of what is left for hot experts and a KV cache whose size was not asked for


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
    sizes = len(bucket_sizes(padded_rows(config, model)))
    items = []
    if attention == "flashinfer":
        arrays = plan_bytes(sizes, len(set(model.paged_attention)))
        items.append(Item(name, Kind.OTHER, "attention workspace", WORKSPACE_BYTES + arrays))
        items.append(Item(_CPU, Kind.OTHER, "attention plans, pinned", arrays))
        if expanded := max(map(_expanded_bytes, model.layers), default=0):
            items.append(Item(name, Kind.OTHER, "keys and values of long chunks", expanded))
    if config.cuda_graphs == "auto":
        families = 2 if config.max_adapter_slots else 1
        label, graphs = f"CUDA graphs, {families} x {sizes} sizes", families * sizes * _GRAPH_BYTES
        items.append(Item(name, Kind.OTHER, label, graphs))
    if config.max_adapter_slots:
        tables = slot_table_bytes(model, config.max_adapter_slots, config.max_adapter_rank, element_bytes)
        label = f"adapter slots, {config.max_adapter_slots} x rank {config.max_adapter_rank}"
        items.append(Item(name, Kind.OTHER, label, tables))
    return items


def _expanded_bytes(layer: LayerSpec) -> int:
    latent = layer.attention
    if not isinstance(latent, Latent) or expands_from(latent) is None:
        return 0
    return piece_bytes(latent, 2)  # flashinfer takes bfloat16


def expert_items(
    config: EngineConfig,
    model: ModelConfig,
    rows: int,
    element_bytes: int,
    device: str,
    backends: Sequence[str],
    streams: bool,
    expert_bytes: int,
) -> list[Item]:
    """What experts need beside their weights: scratch memory and biases of those that a GPU computes, the rows' pinned
    twins of those that the CPU computes, and (`streams`) two layers that are on their way to the GPU. `rows`: of a step
    at most; `expert_bytes`: of the largest expert on the GPU."""
    name, items = _name(device), []
    if not model.sparse_layers:
        return []
    if streams or {"gpu", "hybrid"} & set(backends):
        sizes = Sizes.of(model)
        scratch = GpuCompute.planned_bytes(
            sizes,
            element_bytes,
            rows,
            config.max_adapter_rank,
            quantised=expert_bytes < sizes.expert_values * element_bytes,
        )
        own = HybridExperts.scratch_bytes(sizes, rows) if "hybrid" in backends else 0
        items.append(Item(name, Kind.STEP, "expert scratch", scratch + own, own))
    if (streams or "hybrid" in backends) and model.experts is not None and model.experts.expert_bias:
        biases = len(model.sparse_layers) * Elementwise.planned_bytes(Sizes.of(model))
        items.append(Item(name, Kind.EXPERTS, "biases of all experts", biases))
    if {"native", "hybrid", "kt"} & set(backends):
        row = ExpertBuffers.row_bytes(model.num_experts_per_tok, model.hidden_size, element_bytes)
        items.append(Item(_CPU, Kind.STEP, f"expert rows, {rows}, pinned", rows * row, rows * row))
    if streams:
        streaming = LayerStream.buffer_bytes(Sizes.of(model), expert_bytes)
        items.append(Item(name, Kind.OTHER, "prefill streaming, 2 layers and one packed", streaming))
        if config.max_adapter_slots:
            rank = min(TYPICAL_RANK, config.max_adapter_rank)
            lora = StreamedExperts.lora_bytes(Sizes.of(model), config.max_adapter_slots, rank, element_bytes)
            items.append(Item(name, Kind.ADAPTERS, f"their LoRA, {config.max_adapter_slots} x rank {rank}", lora))
    return items


def adapter_copies(backends: Sequence[str], streams: bool, device: str = "cuda") -> dict[str, int]:
    """How often an adapter in a slot is held on each device beside what was read of it: by the CPU's experts, pinned
    for the GPU's, on the GPU. Attention's and routers' slot tables are counted apart: nearly all of an adapter is its
    experts'."""
    on_cpu = bool({"native", "hybrid", "kt", "reference"} & set(backends))
    copies = {_CPU: on_cpu + (streams or "hybrid" in backends)}
    return copies | ({_name(device): 1} if "gpu" in backends else {})


def gpu_adapter_share(on_gpu: int, streams: bool, layers: int) -> float:
    """How much of an adapter's expert part a slot holds there: of the layers that the GPU has (`on_gpu`), and of the
    two that are streamed at a time."""
    return (on_gpu + (min(2, layers) if streams else 0)) / max(layers, 1)


def _name(device: str) -> str:
    return f"GPU {int(device.partition(':')[2] or 0)}"


def hot_expert_bytes(model: ModelConfig, left: int, kv_bytes: int, expert_bytes: int, *, asked: bool) -> int:
    """GPU memory for hybrid experts, of what is `left` for them and the KV cache: what the cache does not need for
    `kv_bytes`, and unless its size was `asked` for at least _HOT_SHARE. At most what all experts take,
    `expert_bytes` each."""
    every = len(model.sparse_layers) * model.num_experts * expert_bytes
    return max(0, min(max(left - kv_bytes, 0 if asked else int(_HOT_SHARE * left)), every))
