"""The sizes that decode steps are padded to, and such a step's small arrays on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.linear.segments import cut, max_tiles
from engine.transfer import to_device

_SMALL = (1, 2, 4)
_STEP = 8  # above, sizes are multiples of this


def bucket_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, ... and max_rows itself."""
    sizes = [*_SMALL, *range(_STEP, max_rows, _STEP), max_rows]
    return sorted({size for size in sizes if size <= max_rows})


class StepInputs:
    """Arrays of M rows at fixed addresses on `device`, parts of one buffer.

    ids, sources, positions, slot_mapping int64 [M]: a row's token is sampled[source] of the step before where
    source >= 0. bsz int32 [1], slots int32 [M], order int32 [M], tiles int32 [n, 3] as in engine.linear.segments.
    """

    def __init__(self, max_rows: int, adapter_slots: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.adapter_slots = adapter_slots
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

    def fill(self, rows: int, values: dict[str, list[int]], slots: list[int]) -> None:
        """`values` of ids, sources, positions and slot_mapping, padded; `rows` of them count."""
        on_gpu = self._device.type == "cuda"
        staging = torch.zeros(self._buffer.shape, dtype=torch.uint8, pin_memory=on_gpu)
        views = self._split(staging)
        for name, column in values.items():
            views[name][: len(column)] = torch.tensor(column, dtype=torch.int64)
        views["bsz"][0] = rows
        order, tiles = cut(slots)
        if tiles:
            views["slots"][: len(slots)] = torch.tensor(slots, dtype=torch.int32)
            views["order"][: len(order)] = torch.tensor(order, dtype=torch.int32)
            views["tiles"][: len(tiles)] = torch.tensor(tiles, dtype=torch.int32)
        self._buffer.copy_(staging, non_blocking=on_gpu)  # one copy; pinned memory is not reused before it ended


def lora_groups(slots: Sequence[int], device: torch.device) -> list[tuple[int, torch.Tensor]]:
    """(slot, its tokens' indices int64) of each adapter in a batch."""
    members: dict[int, list[int]] = {}
    for token, slot in enumerate(slots):
        if slot:
            members.setdefault(slot, []).append(token)
    return [(slot, to_device(members[slot], torch.int64, device)) for slot in sorted(members)]
