"""The frozen experts on our CPU kernels, by a run's settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from engine.errors import UserError
from engine.experts.capabilities import PackedWeights, needed
from engine.experts.native import PROJECTIONS, NativeExperts
from engine.weights.store import WeightSource
from native.topology import make_pool, pool_groups
from training.config import TrainConfig
from training.experts.base import TrainableExperts
from training.experts.native import trainable_layers
from training.experts.streamed.choice import Streaming
from training.memory.costs import largest_micro_batch
from training.model import ExpertMaker

if TYPE_CHECKING:
    from native import _native

PLAIN_TYPES = ("F32", "F16", "BF16")  # of weights that kt_backend may round


def expert_maker(config: TrainConfig, note: Callable[[str], None] | None = None, device: str = "cpu") -> ExpertMaker:
    """Packs the experts of a model as `config` says; `note` gets lines about them. `device`: of attention; a GPU may
    get the weights of large micro-batches. UserError for settings that this machine does not allow; the maker raises it
    for those that these weights do not."""
    streaming = streaming_of(config, device)

    def make(source: WeightSource, dtype: torch.dtype) -> Mapping[int, TrainableExperts]:
        check_backend(config, source)
        backend = NativeExperts(
            source.config,
            dtype,
            worker_pool(config.kt_num_threads, per_node=config.kt_tp_enabled),
            **packing(config, dtype),
        )
        for layer in source.config.sparse_layers:
            backend.load_layer(layer, source.experts(layer))
        lowered = threads_note(config.kt_num_threads)
        lines = [*([] if lowered is None else [lowered]), _line(backend, source)]
        keep = config.kt_cpu_activation == "retain"
        layers: Mapping[int, TrainableExperts] = trainable_layers(
            backend, source.config, keep=keep, locked=device != "cpu"
        )
        plain = source.config.experts is not None and source.config.experts.plain
        if streaming is not None and layers and plain:
            packed = needed(backend, PackedWeights)
            layers, line = streaming.layers(layers, packed, source.config, dtype, keep=keep)
            lines.append(line)
        if note is not None:
            note("\n".join(lines))
        return layers

    return make


def streaming_of(config: TrainConfig, device: str) -> Streaming | None:
    """How a run streams experts to the `device` of its attention; None: not at all. UserError if it asks for that
    without a GPU."""
    least = config.stream_min_tokens
    if device == "cpu":
        if least:
            raise UserError(
                f"stream_min_tokens is {least}, but there is no GPU to stream weights to: leave it out",
                "stream_min_tokens",
            )
        return None
    return None if least == 0 else Streaming(torch.device(device), least, largest_micro_batch(config))


def packing(config: TrainConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What `kt_backend` means to NativeExperts. `dtype`: of the activations."""
    return {
        "plain": torch.bfloat16 if config.kt_backend == "AMXBF16" else dtype,
        "quantise": "int8" if config.kt_backend == "AMXInt8" else None,
    }


def worker_pool(threads: int | None = None, *, per_node: bool = True) -> _native.WorkerPool:
    """The threads that compute the experts. `per_node`: in a group per NUMA node, each of which holds and computes a
    part of every expert; else all of them compute all."""
    threads = usable_threads(threads)
    if per_node:
        return make_pool(threads)
    from native import _native

    return _native.WorkerPool([list(chain.from_iterable(pool_groups(threads)))])


def usable_threads(wanted: int | None) -> int | None:
    """`kt_num_threads` on this machine: no more than its CPUs, since threads that share one wait for each other."""
    return None if wanted is None else min(wanted, len(os.sched_getaffinity(0)))


def threads_note(wanted: int | None) -> str | None:
    """A line for the user where fewer threads are used than are wanted."""
    used = usable_threads(wanted)
    return None if used == wanted else f"kt_num_threads: {wanted} is lowered to {used}, the CPUs of this machine"


def check_backend(config: TrainConfig, source: WeightSource) -> None:
    """UserError if kt_backend names a type that these experts are not held in: what is quantised stays as it is."""
    if config.kt_backend == "auto":
        return
    for layer in source.config.sparse_layers:
        for kind in map(source.experts(layer).type, PROJECTIONS):
            if kind not in PLAIN_TYPES:
                raise UserError(
                    f"kt_backend is {config.kt_backend}, but the experts of layer {layer} are {kind}, and are held as "
                    "they are: set it to auto, or leave it out",
                    "kt_backend",
                )


def _line(backend: NativeExperts, source: WeightSource) -> str:
    layers, kinds = source.config.sparse_layers, {source.experts(i).type("gate") for i in source.config.sparse_layers}
    threads = backend.pool.threads
    return (
        f"experts: {len(layers)} layers of {source.config.num_experts} from {', '.join(sorted(kinds)) or 'nothing'}, "
        f"{backend.num_bytes / 1e9:.2f} GB in memory; {backend.isa} kernels, {threads} threads"
    )
