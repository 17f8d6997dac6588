"""Arithmetic of a run, counted, as a share of what the CPU can do.

Operations are two per multiply-add, of products with the base's weights, of LoRA and of attention. A token takes each
forward, and backward for the gradient of the input (LoRA: of its matrices too); `gradient_checkpointing` takes layers
forward again, kt_cpu_activation: recompute two thirds of the experts, and stage dpo all of the base for the reference.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from engine.architectures.config import ModelConfig
from training.config import TrainConfig
from training.kernels import worker_pool
from training.memory.costs import dense_lora, is_target

_EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_SIDE = 4096  # of the matrices that a GPU's peak is measured with


@dataclass
class Meter:
    """`peak`: operations a second of all threads of the pool, or of a GPU; `done`: what was counted so far."""

    per_token: float
    per_rank: float  # of a token, for each rank of its LoRA
    per_pair: float  # of a token and one that it attends to
    rank: int  # where none is named
    peak: float
    done: float = 0.0

    def count(self, lengths: Sequence[int], rank: int | None = None) -> None:
        """Samples of so many tokens, which one step takes forward and backward."""
        pairs = sum(length * (length + 1) / 2 for length in lengths)
        per_token = self.per_token + (rank or self.rank) * self.per_rank
        self.done += sum(lengths) * per_token + pairs * self.per_pair


def make_meter(
    model: ModelConfig, config: TrainConfig, *, experts_only: bool, gpu: torch.device | None = None
) -> Meter:
    """`experts_only`: leave out what a GPU computes. `gpu`: what computes everything, if one does. Measures the peak,
    in some hundredths of a second."""
    again, reference = config.gradient_checkpointing, config.stage == "dpo"
    passes, lora_passes = 2 + again + reference, 3 + again
    expert_passes = passes + (2 / 3 if config.kt_cpu_activation == "recompute" else 0)
    layers = range(model.num_hidden_layers)
    expert = 2 * model.num_experts_per_tok * (model.hidden_size + model.moe_intermediate_size)
    targets = sum(is_target(config, name) for name in _EXPERT_PROJECTIONS)
    weights = 6 * model.num_experts_per_tok * model.hidden_size * model.moe_intermediate_size
    per_token = len(model.sparse_layers) * weights * expert_passes
    per_rank = float(len(model.sparse_layers) * expert * targets * lora_passes)
    per_pair = 0.0
    if not experts_only:
        linears = [m.shape for layer in layers for m in model.modules(layer) if m.kind == "linear"]
        per_token += 2.0 * sum(map(prod, linears)) * passes
        per_token += 2.0 * model.hidden_size * model.vocab_size * (2 + reference)
        sizes = [a + b for layer in layers for _, a, b in dense_lora(model, config, layer)]
        per_rank += 2.0 * sum(sizes) * lora_passes
        per_pair = 4.0 * sum(attention.q_width for attention in model.paged_attention) * (3 + again + reference)
    return Meter(per_token, per_rank, per_pair, config.lora_rank, _gpu_peak(config, gpu) if gpu else _peak(config))


def _peak(config: TrainConfig) -> float:
    """Of the type that activations are multiplied in, or float32 where the CPU has no instruction for it."""
    from native import _native

    pool = worker_pool(config.kt_num_threads, per_node=config.kt_tp_enabled)
    return (_native.peak_operations(pool, "bf16") if config.bf16 else 0.0) or _native.peak_operations(pool, "f32")


def _gpu_peak(config: TrainConfig, device: torch.device) -> float:
    """Of a large product of random numbers in the type of activations, the fastest of three."""
    x = torch.randn(_SIDE, _SIDE, device=device, dtype=torch.bfloat16 if config.bf16 else torch.float32)
    times = []
    for _ in range(4):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        torch.mm(x, x)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return 2.0 * _SIDE**3 / min(times[1:])
