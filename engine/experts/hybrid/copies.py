"""Copies of experts and their LoRA into GPU memory, on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from engine.experts.gpu.adapters import HostAdapter
from engine.experts.gpu.layout import Sizes
from engine.experts.gpu.source import PackedLayer, PackedSource
from engine.experts.stream import event_here

_AT_ONCE = 4  # experts that are converted by the same launches: bounds the memory that takes


@dataclass
class Arrival:
    """Copies in flight: an expert (expert slot -1: it is here already) and LoRA blocks of slots."""

    expert: int
    expert_slot: int
    lora: dict[int, tuple[HostAdapter, int]] = field(default_factory=dict)  # slot -> (whose, first value)
    done: Any = None  # event; None where copies are synchronous


class Copies:
    """`layers`: the model's numbers of the layers, E experts each. `expert_slots`: [F, >= an expert], bytes or numbers
    of `dtype`."""

    def __init__(
        self, sizes: Sizes, layers: list[int], expert_slots: torch.Tensor, source: PackedSource, dtype: torch.dtype
    ) -> None:
        self._sizes = sizes
        self._layers = layers
        self._expert_slots = expert_slots
        self._source = source
        self._dtype = dtype
        self._gpu = expert_slots.is_cuda
        self._staging: torch.Tensor | None = None
        cuda: Any = torch.cuda
        self._side: Any = cuda.Stream(expert_slots.device) if self._gpu else None

    def start(self, arrivals: list[Arrival]) -> None:
        """In their order, behind what the current stream has been given."""
        if self._side is None:
            self._copy(arrivals)
            return
        self._side.wait_event(event_here(self._gpu))
        with torch.cuda.stream(self._side):
            self._copy(arrivals)

    def synchronize(self) -> None:
        if self._side is not None:
            self._side.synchronize()

    def _copy(self, arrivals: list[Arrival]) -> None:
        for group in self._groups(arrivals):
            self._copy_experts([arrival for arrival in group if arrival.expert_slot >= 0])
            for arrival in group:
                self._copy_lora(arrival)
                arrival.done = event_here(self._gpu)

    def _groups(self, arrivals: list[Arrival]) -> Iterator[list[Arrival]]:
        """In their order, a few at a time; experts of layers in the same formats together."""

        def kind(arrival: Arrival) -> tuple[bool, Sequence[str]]:
            return arrival.expert_slot >= 0, self._place(arrival)[0].formats

        for _, alike in groupby(arrivals, key=kind):
            some = list(alike)
            yield from (some[i : i + _AT_ONCE] for i in range(0, len(some), _AT_ONCE))

    def _place(self, arrival: Arrival) -> tuple[PackedLayer, int]:
        number, expert = divmod(arrival.expert, self._sizes.experts)
        return self._source[self._layers[number]], expert

    def _copy_experts(self, arrivals: list[Arrival]) -> None:
        if not arrivals:
            return
        places = [self._place(arrival) for arrival in arrivals]
        first, packed = places[0][0], self._expert_slots.view(torch.uint8)
        size = first.layout(self._dtype.itemsize).num_bytes
        made = torch.empty(len(arrivals), size, dtype=torch.uint8, device=packed.device)
        staging = self._staging_for(len(arrivals) * first.expert_bytes)
        first.bring_each(places, staging)
        first.convert(len(arrivals), made, staging, self._dtype)
        for arrival, values in zip(arrivals, made.unbind(), strict=True):
            packed[arrival.expert_slot, :size].copy_(values)

    def _copy_lora(self, arrival: Arrival) -> None:
        number, expert = divmod(arrival.expert, self._sizes.experts)
        flat = self._expert_slots.view(-1)
        for adapter, at in arrival.lora.values():
            block = adapter.blocks[self._layers[number]][expert].view(flat.dtype)
            flat[at : at + block.numel()].copy_(block, non_blocking=True)

    @torch.inference_mode(False)  # memory that is written to in and out of that mode
    def _staging_for(self, size: int) -> torch.Tensor:
        if self._staging is None or self._staging.numel() < size:
            self._staging = torch.empty(size, dtype=torch.uint8, device=self._expert_slots.device)
        return self._staging
