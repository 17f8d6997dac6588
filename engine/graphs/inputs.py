"""The sizes that decode steps are padded to, and such a step's small arrays on the device."""

from __future__ import annotations

import torch

from engine.attention.base import BLOCK_SIZE
from engine.linear.segments import Groups, max_tiles
from engine.steps.inputs import StepArrays

_SMALL = (1, 2, 4)
_STEP = 8  # above, sizes are multiples of this


def bucket_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, ... and max_rows itself."""
    sizes = [*_SMALL, *range(_STEP, max_rows, _STEP), max_rows]
    return sorted({size for size in sizes if size <= max_rows})


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

    def _split(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        m = self.max_rows
        wide, narrow = buffer[: 32 * m].view(torch.int64), buffer[32 * m :].view(torch.int32)
        views = dict(zip(("ids", "sources", "positions", "slot_mapping"), wide.split(m), strict=True))  # type: ignore[no-untyped-call]
        views["bsz"], views["slots"], views["order"] = narrow[:1], narrow[2 : 2 + m], narrow[2 + m : 2 + 2 * m]
        views["tiles"] = narrow[2 + 2 * m :].view(-1, 3)
        return views

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._views[name]

    def fill(self, step: StepArrays, valid_rows: int) -> None:
        """A step of one token a row. `valid_rows`: what `bsz` says."""
        on_gpu, rows = self._device.type == "cuda", step.num_tokens
        staging = torch.zeros(self._buffer.shape, dtype=torch.uint8, pin_memory=on_gpu)
        views = {name: view.numpy() for name, view in self._split(staging).items()}
        for name in ("ids", "sources", "positions", "slot_mapping"):
            views[name][:rows] = getattr(step, name)
        views["sources"][rows:] = -1
        views["slot_mapping"][rows:] = self._scratch_slot
        views["bsz"][0] = valid_rows
        if step.adapters.any():
            groups = Groups.of(step.adapters)
            tiles = groups.tiles
            views["slots"][:rows] = step.adapters
            views["order"][: len(groups.order)] = groups.order
            views["tiles"][: len(tiles)] = tiles
        self._buffer.copy_(staging, non_blocking=on_gpu)  # one copy; pinned memory is not reused before it ended
