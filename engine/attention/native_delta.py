"""Gated delta nets on the CPU kernels, rows bf16 or float32, states float32."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from engine.architectures.parts.delta import DeltaNet
from engine.attention.base import BatchLayout
from engine.attention.delta import DeltaBackend, DeltaInputs, DeltaVectors, StateSlots, check_layout
from engine.errors import EngineError, UserError

if TYPE_CHECKING:
    from native import _native

_DIM_STEP = 16
_MAX_KERNEL = 8


def delta_limit(spec: DeltaNet) -> str | None:
    """Why the kernels cannot compute this delta net; None if they can."""
    for name, dim in (("linear_key_head_dim", spec.key_dim), ("linear_value_head_dim", spec.value_dim)):
        if dim % _DIM_STEP:
            return f"{name} {dim} is not a multiple of {_DIM_STEP}"
    if spec.kernel > _MAX_KERNEL:
        return f"linear_conv_kernel_dim is {spec.kernel}; the kernels take up to {_MAX_KERNEL}"
    return None


class NativeDeltaNet(DeltaBackend):
    """States of `layers`; `pool`, `isa` and NaN as in `NativeAttention`. A token's result depends on which others of
    its sequence are in the step, within rounding, and on no other sequence. `one_by_one`: not by a bit on these either;
    prompts are computed one position after another.

    Raises UserError for shapes that the kernels do not take.
    """

    def __init__(
        self,
        spec: DeltaNet,
        layers: Sequence[int],
        slots: StateSlots,
        pool: _native.WorkerPool,
        isa: str = "",
        one_by_one: bool = False,
    ) -> None:
        from native import _native

        self._native, self._spec, self._num_slots = _native, spec, slots.count
        try:
            self.kernel = _native.DeltaNet(
                pool,
                layers=len(layers),
                slots=slots.count,
                key_heads=spec.key_heads,
                value_heads=spec.value_heads,
                key_dim=spec.key_dim,
                value_dim=spec.value_dim,
                kernel=spec.kernel,
                fused=spec.fused,
                fused_gates=spec.fused_gates,
                tiled=spec.tiled,
                one_by_one=one_by_one,
                keeping=slots.own,
                kept=slots.kept,
                isa=isa,
            )
        except ValueError as error:
            raise UserError(f"native delta net: {error}", field="attention_backend") from error
        self.places_of = {layer: place for place, layer in enumerate(layers)}  # among the kernels' layers

    def plan(self, batch: BatchLayout) -> None:
        check_layout(batch)
        states = [(each.slot, each.source, each.saves, each.replayed, each.keeps) for each in batch.states]
        try:
            self.kernel.plan(batch.row_starts, batch.context_lens, states)
        except ValueError as error:
            raise EngineError(f"native delta net: {error}") from error

    def host_planes(self) -> list[NDArray[np.uint8]]:
        """Valid as long as this object lives."""
        layers, slots, slot_bytes = len(self.places_of), self._num_slots, self.kernel.slot_bytes
        memory = (ctypes.c_uint8 * (layers * slots * slot_bytes)).from_address(self.kernel.state_address)
        return [np.ctypeslib.as_array(memory).reshape(layers, slots, slot_bytes)]

    def vectors(self, given: DeltaVectors) -> _native.DeltaVectors:
        """For the kernels; `given` must outlive it."""
        return self._native.DeltaVectors(
            conv=given.conv.data_ptr(),
            decay=given.decay.data_ptr(),
            dt_bias=given.dt_bias.data_ptr(),
            norm=given.norm.data_ptr(),
            norm_eps=given.norm_eps,
        )

    def mix(self, layer: int, given: DeltaInputs, vectors: DeltaVectors) -> torch.Tensor:
        qkv, z, b, a = given.wide[0], given.wide[-1], given.gates[0], given.gates[-1]
        tokens, spec = len(qkv), self._spec
        out = torch.empty((tokens, spec.value_width), dtype=qkv.dtype)
        try:
            self.kernel.forward(
                self.places_of[layer],
                tokens,
                self.vectors(vectors),
                qkv=qkv.data_ptr(),
                qkv_stride=qkv.stride(0),
                z=z.data_ptr(),
                z_stride=z.stride(0),
                b=b.data_ptr(),
                a=a.data_ptr(),
                gate_stride=b.stride(0),
                out=out.data_ptr(),
                out_stride=spec.value_width,
                is_bf16=qkv.dtype == torch.bfloat16,
            )
        except ValueError as error:
            raise EngineError(f"native delta net: {error}") from error
        return out
