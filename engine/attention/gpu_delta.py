"""Gated delta nets on an NVIDIA GPU: our Triton kernels over states in slots of its memory."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from engine.architectures.parts.delta import DeltaNet
from engine.attention.base import BatchLayout, unit_bytes
from engine.attention.delta import (
    CHUNK,
    DeltaBackend,
    DeltaInputs,
    DeltaVectors,
    Ruled,
    StateSlots,
    check_layout,
    split_gates,
    split_wide,
)
from engine.device import to_device
from engine.errors import EngineError
from scheduler.plan import NO_STATE, RowState

_MAX_DIM = 128  # beyond it chunks take more shared memory than some GPUs have
_ALIGNED = 16  # columns of a table: kernels are compiled again for addresses that are aligned otherwise


def gpu_delta_limit(spec: DeltaNet) -> str | None:
    """Why the kernels cannot compute this delta net; None if they can."""
    for name, dim in (("linear_key_head_dim", spec.key_dim), ("linear_value_head_dim", spec.value_dim)):
        if dim > _MAX_DIM:
            return f"{name} {dim} is over {_MAX_DIM}"
    return None


@dataclass
class _Cut:
    """A step's rows as the kernels take them. `single`: rows of one token as (token, source, slot, copy); `chunks` and
    `rows`: the longer ones as `delta_chunk_kernels.Chunks` has them."""

    single: list[tuple[int, int, int, int]] = field(default_factory=list)
    chunks: list[tuple[int, ...]] = field(default_factory=list)
    rows: list[tuple[int, ...]] = field(default_factory=list)
    behind: list[tuple[int, int, int, int]] = field(default_factory=list)  # (slot, replayed, begin, end) of rows that
    #   begin with kept positions: these and their own tokens come again behind the step's
    keeps: list[tuple[int, int, int]] = field(default_factory=list)  # (slot, begin, end) of rows that keep their inputs
    tokens: int = 0

    @classmethod
    def of(cls, batch: BatchLayout, scratch: int) -> _Cut:
        cut = cls(tokens=batch.num_tokens)
        starts = batch.row_starts
        for row, state in enumerate(batch.states):
            begin, end, slot = starts[row], starts[row + 1], scratch if state.slot == NO_STATE else state.slot
            if end - begin == 1 and not (state.replayed or state.keeps or len(state.saves) > 1):
                copy = state.saves[0][1] if state.saves else -1
                cut.single.append((begin, state.source, slot, copy))
            else:
                cut._long(state, slot, begin, end, batch.context_lens[row])
        return cut

    def _long(self, state: RowState, slot: int, begin: int, end: int, context: int) -> None:
        first, replayed = context - (end - begin), state.replayed
        at = begin  # where the row's first token, kept or its own, is
        if replayed:
            self.behind.append((slot, replayed, begin, end))
            at, self.tokens = self.tokens, self.tokens + replayed + end - begin
        stops = [*state.saves]
        if state.keeps or replayed:
            stops.append((first, slot if state.keeps else -1))
        first_chunk, first_token, position = len(self.chunks), at, first - replayed
        for stop, copy in (*sorted(stops, key=lambda each: each[0]), (context, -1)):
            while stop - position > CHUNK:
                self._chunk(at, CHUNK, position - first + begin if position >= first else -1, -1)
                at, position = at + CHUNK, position + CHUNK
            if stop > position or copy >= 0:
                target = position - first + begin if position >= first and stop > position else -1
                self._chunk(at, stop - position, target, copy)
                at, position = at + stop - position, stop
        last = first_token + replayed if state.keeps else at
        ends = -1 if state.keeps else slot
        count = len(self.chunks) - first_chunk
        self.rows.append((first_chunk, count, state.source, ends, first_token, slot, last))
        if state.keeps:
            self.keeps.append((slot, begin, end))

    def _chunk(self, token: int, length: int, target: int, copy: int) -> None:
        self.chunks.append((token, length, len(self.rows), copy, target))


@dataclass(frozen=True)
class _Planned:
    """A step's tables on the GPU."""

    cut: _Cut
    single: torch.Tensor
    longer: Any = None  # delta_chunk_kernels.Chunks


class GpuDeltaNet(DeltaBackend):
    """States of each of `layers`, float32, and a slot more than there are, which rows without one write to.

    A padded batch reads its table at a fixed address: what `mix` launches may be captured and replayed after any later
    `plan` of that size. In other batches rows of one token are computed at once, and longer ones in chunks.
    `max_rows`: of a padded batch.
    """

    captures = True

    def __init__(
        self, spec: DeltaNet, layers: Sequence[int], slots: StateSlots, device: torch.device, max_rows: int
    ) -> None:
        self._kernels: Any = importlib.import_module("engine.attention.delta_kernels")
        self._chunks: Any = importlib.import_module("engine.attention.delta_chunk_kernels")
        self._spec, self._device, self._scratch = spec, device, slots.count
        states = (slots.count + 1, spec.value_heads, spec.key_dim, spec.value_dim)
        past = (slots.count + 1, spec.kernel - 1, spec.channels)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, device=device)

        self.slots = {layer: self._kernels.Slots(zeros(*states), zeros(*past)) for layer in layers}
        own, heads = (slots.own, slots.kept), spec.value_heads
        self._kept = {
            layer: Ruled(zeros(*own, spec.channels), zeros(*own, heads), zeros(*own, heads)) for layer in layers
        }
        self._table = torch.zeros(4, _wide(max_rows), dtype=torch.int32, device=device)
        self._planned: _Planned | None = None
        self.notes = ("delta nets: Triton kernels, rows of one token all at once, longer ones in chunks of 64",)

    def plan(self, batch: BatchLayout) -> None:
        check_layout(batch)
        cut, longer = _Cut.of(batch, self._scratch), None
        if batch.padded:
            if cut.chunks or len(cut.single) > self._table.shape[1]:
                raise EngineError(f"a padded step of {batch.num_rows} rows, of which {len(cut.rows)} are longer ones")
            single = self._table
            values = torch.as_tensor(_columns(cut.single, 4, single.shape[1]))
            single.copy_(values if self._device.type == "cpu" else values.pin_memory(), non_blocking=True)
        else:
            single = self._sent(cut.single, 4)
            if cut.chunks:
                chunks, rows = self._sent(cut.chunks, 5), self._sent(cut.rows, 7)
                longer = self._chunks.Chunks(chunks, len(cut.chunks), rows, len(cut.rows))
        self._planned = _Planned(cut, single, longer)

    def _sent(self, rows: Sequence[tuple[int, ...]], fields: int) -> torch.Tensor:
        return to_device(_columns(rows, fields, _wide(len(rows))), torch.int32, self._device)

    def device_planes(self) -> list[torch.Tensor]:
        """The slots but the last one, which is nobody's."""
        held = [part for each in self.slots.values() for part in (each.states, each.past)]
        return [unit_bytes(part[: self._scratch]) for part in held]

    def mix(self, layer: int, given: DeltaInputs, vectors: DeltaVectors) -> torch.Tensor:
        if self._planned is None:
            raise EngineError("plan() comes before mix()")
        planned, slots, spec = self._planned, self.slots[layer], self._spec
        wide, gates = [_rows(part) for part in given.wide], [_rows(part) for part in given.gates]
        out = wide[0].new_empty((len(wide[0]), spec.value_width))
        if planned.cut.single:
            single = planned.cut.single
            self._kernels.step_one(wide, gates, vectors, spec, slots, planned.single, len(single), out)
        if planned.longer is not None:
            qkv, z = split_wide(wide[0], spec) if spec.fused else wide
            b, a = split_gates(gates[0], spec) if spec.fused_gates else gates
            ruled = Ruled(
                qkv, (vectors.decay * F.softplus(a + vectors.dt_bias)).contiguous(), torch.sigmoid(b).contiguous()
            )
            held = self._with_kept(layer, ruled, planned.cut)
            self._chunks.run_rows(
                held.qkv, z, held.decay, held.rate, vectors, spec, slots, planned.longer, out
            )  # before what is kept of the row before is overwritten
            for slot, begin, end in planned.cut.keeps:
                self._kept[layer].cut(slot).cut(slice(end - begin)).copy_(ruled.cut(slice(begin, end)))
        return out

    def _with_kept(self, layer: int, ruled: Ruled, cut: _Cut) -> Ruled:
        """Behind the step's tokens, those of rows that begin with kept positions once more. What is kept in float32 has
        the values of narrower inputs."""
        if not cut.behind:
            return ruled
        parts = [ruled]
        for slot, replayed, begin, end in cut.behind:
            parts += [self._kept[layer].cut(slot).cut(slice(replayed)), ruled.cut(slice(begin, end))]
        return Ruled(
            torch.cat([part.qkv.to(ruled.qkv.dtype) for part in parts]),
            torch.cat([part.decay for part in parts]),
            torch.cat([part.rate for part in parts]),
        )


def _wide(columns: int) -> int:
    return -(-max(columns, 1) // _ALIGNED) * _ALIGNED


def _columns(rows: Sequence[tuple[int, ...]], fields: int, columns: int) -> NDArray[np.int32]:
    """[fields, columns], filled up with zeros."""
    made = np.zeros((fields, columns), np.int32)
    if rows:
        made[:, : len(rows)] = np.array(rows, np.int32).T
    return made


def _rows(x: torch.Tensor) -> torch.Tensor:
    """The same with values of a row side by side."""
    return x if x.stride(1) == 1 else x.contiguous()
