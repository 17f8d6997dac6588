"""What an expert backend can offer beyond its contract. Backends compose through these: one that wraps another asks for
a capability, never for a class, and offers to the outside what still holds through it.

    native   NativeTasks, PackedWeights        its tasks run without Python; its weights can be read by others
             NativeKernels                     who may compute over them as it does
             ExpertCounters, ExpertPlaces      it counts what it computes, and knows what it holds
    bridge   PartialTasks, PackedWeights       a row's experts can be split between the CPU and the GPU
             ExpertCounters, ExpertPlaces      of what the CPU computes and holds
             NativeKernels
    hybrid   GpuParts (engine/experts/gpu/parts.py), HotExperts, ExpertCounters of the CPU's part, ExpertPlaces,
             PackedWeights, NativeKernels      of all experts
    gpu      ExpertPlaces
    streamed ExpertCounters, ExpertPlaces, PackedWeights, NativeKernels of the backend within;
             StreamedPrompts (engine/experts/streamed/streaming.py), where long prompts have a lane

All of them, `reference` and, on a CPU, `kt` offer TouchedExperts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from engine.errors import ExpertBackendError
from engine.experts.base import ExpertBackend, ExpertTask

if TYPE_CHECKING:
    from native import _native

C = TypeVar("C")


@dataclass(frozen=True)
class NativeTasks:
    """Bound tasks that native code can run, on a pool of its own workers."""

    pool: _native.WorkerPool
    native_task: Callable[[ExpertTask], Any]  # the native._native.MoeTask of a bound task


@dataclass(frozen=True)
class PackedWeights:
    """`native._native.ExpertLayer` by layer, for all that are loaded: host memory in the layout of
    native/src/packing/format.hpp, which others may read and pin."""

    layers: Mapping[int, Any]


@dataclass(frozen=True)
class NativeKernels:
    """What computes packed weights: a pool of workers, and the instruction set that they are packed for."""

    pool: _native.WorkerPool
    isa: str


@dataclass(frozen=True)
class ExpertCounters:
    """What the CPU has computed so far. `choices`: by layer, how often rows have chosen each of its experts, [E];
    `weight_bytes_read`: bytes of base weights that were gone through."""

    choices: Callable[[], dict[int, list[int]]]
    weight_bytes_read: Callable[[], int]


@dataclass(frozen=True)
class TouchedExperts:
    """`counts` int64 [layers of the model]: each call of a layer adds how many distinct experts its valid rows have
    chosen, wherever these are computed. It lies where the calls run and is written in their order: who reads it on
    their stream behind a step, and has set it to zero there before, has the step's own counts."""

    counts: torch.Tensor

    @classmethod
    def of(cls, layers: int, device: torch.device | None = None) -> TouchedExperts:
        """`device`: None for the CPU."""
        return cls(torch.zeros(layers, dtype=torch.int64, device=device))


@dataclass(frozen=True)
class ExpertPlaces:
    """`num_bytes`: of base weights by device, "CPU" and "GPU" (an expert may be on both). `choices`, where some are on
    the GPU: those that rows have made so far, and how many of their experts were there; a few steps old."""

    num_bytes: Callable[[], Mapping[str, int]]
    choices: Callable[[], tuple[int, int]] | None = None


@dataclass(frozen=True)
class HotExperts:
    """Experts that GPU memory holds, until the next step begins. `expert_slots`: uint8 [F, bytes]; `of`: by layer,
    int64 [E] on the host, the slot of each expert, -1: none."""

    expert_slots: torch.Tensor
    of: Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class HotPart:
    """What the GPU computes of a layer itself. `place` int32 [slots, E] (-1: on the CPU), `uses` int32 [E] counts,
    `extra` float32 [M, H] is added to the CPU's result."""

    place: torch.Tensor
    uses: torch.Tensor
    extra: torch.Tensor


@dataclass(frozen=True)
class PartialTasks:
    """Tasks of which a GPU may compute a part: `post` the rows' experts that are not the GPU's own, `wait` for them and
    add the GPU's part. Arguments: the task, the part (None: nothing), a raw stream or None."""

    post: Callable[[ExpertTask, HotPart | None, Any], None]
    wait: Callable[[ExpertTask, HotPart | None, Any], None]


def needed(backend: ExpertBackend, kind: type[C]) -> C:
    """A capability without which the caller cannot work. ExpertBackendError if the backend does not offer it."""
    offered = backend.capability(kind)
    if offered is None:
        raise ExpertBackendError(f"experts by {type(backend).__name__} offer no {kind.__name__}")
    return offered
