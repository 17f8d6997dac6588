"""What streaming the experts of large micro-batches takes of a GPU (training/experts/streamed)."""

from __future__ import annotations

from engine.experts.gpu.compute import CHUNK_ROWS
from engine.experts.gpu.layout import ExpertLayout, Sizes
from engine.experts.native import PROJECTIONS
from engine.experts.streamed.layers import SLICE_EXPERTS, LayerStream
from engine.weights.store import WeightSource
from training.config import TrainConfig
from training.memory.costs import Run, expert_bytes, largest_micro_batch, lora_parameters


def streams(config: TrainConfig) -> bool | None:
    """Whether the largest micro-batch is streamed, if there is a GPU; None: that is measured as the run begins."""
    least = config.stream_min_tokens
    return None if least is None else 0 < least <= largest_micro_batch(config)


def tokens_on_cpu(run: Run) -> int:
    """Of the largest micro-batch of which the CPU may compute the experts."""
    least = run.config.stream_min_tokens
    return min(run.tokens, least - 1) if streams(run.config) and least else run.tokens


def buffer_bytes(run: Run, source: WeightSource) -> int:
    """Two layers as plain numbers, and a slice of one while it is unpacked, by several operations if it is
    quantised."""
    sizes, stores = Sizes.of(run.model), (source.experts(layer) for layer in run.model.sparse_layers)
    plain = all(not store.expert(name, 0).quantised for store in stores for name in PROJECTIONS)
    plain = plain and run.config.kt_backend != "AMXInt8"
    values = min(SLICE_EXPERTS, sizes.experts) * sizes.hidden * sizes.inner
    expert = ExpertLayout.of(sizes, ("f32",) * 3, run.element).num_bytes
    return LayerStream.buffer_bytes(sizes, expert) + values * (2 * run.element if plain else 24)


def scratch_bytes(run: Run) -> int:
    """Of one layer: rows, products and their gradients of each choice of a chunk, float32 where they are multiplied
    element by element; each adapter's matrices in the products' type, their gradients and the sums so far."""
    h, i, e, k = run.model.hidden_size, run.model.moe_intermediate_size, run.element, run.model.num_experts_per_tok
    rows = min(run.tokens, CHUNK_ROWS)
    again = 2 * i * e if run.config.kt_cpu_activation == "recompute" else 0
    per_choice = 3 * h * e + 4 * i * e + 32 * i + 8 * run.rank * e + again
    matrices = sum(sum(lora_parameters(run.model, each)[1:]) for each in run.config.runs())
    return rows * (k * per_choice + 12 * h) + matrices // max(len(run.model.sparse_layers), 1) * (8 + e)


def kept_bytes(run: Run) -> int:
    """What a token keeps of a layer's routed experts: as on the CPU, and the order of its choices."""
    return expert_bytes(run) + 8 * run.model.num_experts_per_tok
