"""The small arrays of a padded decode step on the device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from numpy.typing import NDArray

from engine.attention.base import BLOCK_SIZE
from engine.device import Arrival
from engine.linear.segments import Groups, max_tiles
from engine.steps.inputs import StepArrays

_STAGED = 2  # steps whose arrays may be on their way to a GPU


@dataclass
class _Staged:
    """The arrays on the host; beside a GPU, pinned."""

    memory: torch.Tensor
    arrays: dict[str, NDArray[Any]]
    sent: Arrival

    def views(self) -> dict[str, NDArray[Any]]:
        """To be filled. Waits until what was sent before has arrived, which by then it has as a rule."""
        self.sent.wait()
        return self.arrays

    def send(self, to: torch.Tensor) -> None:
        to.copy_(self.memory, non_blocking=True)
        self.sent = Arrival(to.device)


class PaddedInputs:
    """Arrays of M rows at fixed addresses on `device`, parts of one buffer.

    ids, sources, positions, slot_mapping int64 [M] as in `StepArrays`; bsz int32 [1]; slots int32 [M]; order int32 [M],
    tiles int32 [n, 3] as in engine.linear.segments. Padding rows write to `scratch_block`.
    """

    def __init__(self, max_rows: int, adapter_slots: int, scratch_block: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.adapter_slots = adapter_slots
        self._scratch_slot = scratch_block * BLOCK_SIZE
        self._device = device
        tiles = max_tiles(max_rows, adapter_slots)
        self._buffer = torch.zeros(8 * 4 * max_rows + 4 * (2 + 2 * max_rows + 3 * tiles), dtype=torch.uint8)
        if device.type == "cuda":
            self._buffer = self._buffer.to(device)
        self._views = self._split(self._buffer)
        self._staged = cycle([self._stage(device) for _ in range(_STAGED if device.type == "cuda" else 1)])

    def _split(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        m = self.max_rows
        wide, narrow = buffer[: 32 * m].view(torch.int64), buffer[32 * m :].view(torch.int32)
        views = dict(zip(("ids", "sources", "positions", "slot_mapping"), wide.split(m), strict=True))  # type: ignore[no-untyped-call]
        views["bsz"], views["slots"], views["order"] = narrow[:1], narrow[2 : 2 + m], narrow[2 + m : 2 + 2 * m]
        views["tiles"] = narrow[2 + 2 * m :].view(-1, 3)
        return views

    def _stage(self, device: torch.device) -> _Staged:
        memory = torch.zeros(self._buffer.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
        return _Staged(memory, {name: view.numpy() for name, view in self._split(memory).items()}, Arrival(device))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._views[name]

    def fill(self, step: StepArrays, valid_rows: int) -> None:
        """A step of one token a row. `valid_rows`: what `bsz` says."""
        rows, staged = step.num_tokens, next(self._staged)
        views = staged.views()
        for name, padding in (("ids", 0), ("sources", -1), ("positions", 0), ("slot_mapping", self._scratch_slot)):
            views[name][:rows] = getattr(step, name)
            views[name][rows:] = padding
        views["bsz"][0] = valid_rows
        if step.adapted:
            groups = Groups.of(step.adapters)
            tiles = groups.tiles
            views["slots"][:rows] = step.adapters
            views["slots"][rows:] = 0
            views["order"][: len(groups.order)] = groups.order
            views["tiles"][: len(tiles)] = tiles
            views["tiles"][len(tiles) :] = 0
        staged.send(self._buffer)  # one copy
