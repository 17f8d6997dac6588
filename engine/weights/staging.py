"""The way of weights from files into a device's memory: threads read and check them in pinned buffers, and what is
there is copied while the next is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch

from engine.device import Arrival
from engine.weights.dequant import Piece
from engine.weights.store import WeightTensor, pieces_of
from engine.weights.threads import in_order, loading_threads

_ALIGN = 64  # bytes, of packed panels
_MOST_BUFFERS = 32  # more are not filled at a time, whatever the number of threads


@dataclass
class Buffer:
    """Bytes that the device copies from; `copied`: when it last had."""

    memory: torch.Tensor
    copied: Arrival | None = None


class Buffers:
    """`count` buffers, which are taken in turn."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self._count = count
        self._held: list[Buffer] = []
        self._turn = 0

    @property
    def num_bytes(self) -> int:
        return sum(buffer.memory.numel() for buffer in self._held)

    def next(self, num_bytes: int) -> Buffer:
        """At least so large, when nothing is copied from it any more; `copied` must be set after the next copy."""
        if len(self._held) < self._count:
            self._held.append(Buffer(self._memory(num_bytes)))
        self._turn = (self._turn + 1) % len(self._held)
        buffer = self._held[self._turn]
        if buffer.copied is not None:
            buffer.copied.wait()
        if buffer.memory.numel() < num_bytes:
            buffer.memory = self._memory(num_bytes)
        return buffer

    def release(self) -> None:
        """Gives the memory back when nothing is copied from it any more."""
        for buffer in self._held:
            if buffer.copied is not None:
                buffer.copied.wait()
        self._held.clear()

    @torch.inference_mode(False)  # threads write to it, which are in no inference mode
    def _memory(self, num_bytes: int) -> torch.Tensor:
        if self._device.type == "cuda":  # in pages
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        whole = torch.empty(num_bytes + _ALIGN, dtype=torch.uint8)
        return whole[-whole.data_ptr() % _ALIGN :][:num_bytes]


class Staging:
    """Of unpacked weights. Its buffers, of a piece each, are made when they are first needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ahead = min(loading_threads() + 1, _MOST_BUFFERS // 2)
        self._buffers = Buffers(device, 2 * self._ahead)  # half of them are read into, half copied from

    @property
    def num_bytes(self) -> int:
        """Of the buffers."""
        return self._buffers.num_bytes

    def put(self, weights: Sequence[WeightTensor], outs: Sequence[torch.Tensor]) -> None:
        """Each weight's values, dequantised where it is quantised, into one of `outs`, contiguous on the device, in its
        type; behind what the current stream has been given. ModelFileError as of `WeightTensor.dequantise`."""
        flat = [out.view(-1) for out in outs]
        with closing(in_order(self._fills(weights, flat), self._ahead)) as filled:
            for number, piece, bad, values, buffer in filled:
                weights[number].require_finite(bad)
                flat[number][piece.first : piece.first + piece.count].copy_(values, non_blocking=True)
                buffer.copied = Arrival(self._device)

    def release(self) -> None:
        self._buffers.release()

    def _fills(
        self, weights: Sequence[WeightTensor], outs: Sequence[torch.Tensor]
    ) -> Iterator[Callable[[], tuple[int, Piece, int | None, torch.Tensor, Buffer]]]:
        for number, piece in pieces_of(weights):
            size = piece.count * outs[number].element_size()
            buffer = self._buffers.next(size)
            values = buffer.memory[:size].view(outs[number].dtype)
            yield partial(_fill, number, piece, values, buffer)


def _fill(
    number: int, piece: Piece, values: torch.Tensor, buffer: Buffer
) -> tuple[int, Piece, int | None, torch.Tensor, Buffer]:
    return number, piece, piece.into(values), values, buffer
