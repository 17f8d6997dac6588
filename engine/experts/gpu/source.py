"""Where experts on the GPU come from: the CPU backend's own packed memory, pinned in place.

shard s of a layer | gate: expert 0's panels of s, expert 1's ... | up | down |      (native/src/experts/layer.hpp)
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from engine.errors import ExpertBackendError
from engine.experts.capabilities import PackedWeights
from engine.experts.gpu.layout import ExpertLayout, Sizes
from engine.weights.tiled.convert import put_tiles
from engine.weights.tiled.panels import PANEL, panel_bytes, unpack


class PackedLayer:
    """A loaded layer's packed memory as torch tensors that do not own it: uint8 [E, bytes] per projection and shard."""

    def __init__(self, layer: Any, sizes: Sizes) -> None:
        self.sizes = sizes
        self.formats: list[str] = layer.formats
        self._layouts: dict[int, ExpertLayout] = {}
        self._owner = layer
        self._unpin: weakref.finalize[..., PackedLayer] | None = None
        self.shards: list[torch.Tensor] = []  # whole shards
        self.parts: list[list[torch.Tensor]] = [[], [], []]  # by projection, then shard
        for shard in range(layer.shards):
            address, size = layer.shard(shard)
            memory = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
            self.shards.append(memory)
            at = 0
            for projection, (rows, inner) in enumerate(self._shapes):
                pairs = rows // 32
                panels = (pairs * (shard + 1) // layer.shards - pairs * shard // layer.shards) * 2
                bytes_ = panels * panel_bytes(self.formats[projection], inner)
                if bytes_ == 0:  # more shards than pairs of panels
                    continue
                self.parts[projection].append(memory[at : at + sizes.experts * bytes_].view(sizes.experts, bytes_))
                at += sizes.experts * bytes_

    @property
    def _shapes(self) -> list[tuple[int, int]]:
        h, i = self.sizes.hidden, self.sizes.inner
        return [(i, h), (i, h), (h, i)]

    @property
    def expert_bytes(self) -> int:
        return sum(part.shape[1] for parts in self.parts for part in parts)

    def layout(self, element_bytes: int) -> ExpertLayout:
        """How a GPU holds an expert of this layer; `element_bytes`: of what is not quantised there."""
        if element_bytes not in self._layouts:
            self._layouts[element_bytes] = ExpertLayout.of(self.sizes, self.formats, element_bytes)
        return self._layouts[element_bytes]

    def bring(self, first: int, last: int, staging: torch.Tensor) -> None:
        """Packed bytes of experts [first, last) to `staging`, uint8 of at least (last - first) * expert_bytes, on the
        current stream; asynchronous if the memory is pinned. For `convert`."""
        for there, projection, shard in self._parts_in(staging, last - first):
            there.copy_(self.parts[projection][shard][first:last], non_blocking=True)

    def bring_each(self, experts: Sequence[tuple[PackedLayer, int]], staging: torch.Tensor) -> None:
        """The same for single experts of several layers, all in this one's formats."""
        for parts, projection, shard in self._parts_in(staging, len(experts)):
            for there, (layer, expert) in zip(parts.unbind(), experts, strict=True):
                there.copy_(layer.parts[projection][shard][expert], non_blocking=True)

    def convert(
        self,
        count: int,
        expert_slots: torch.Tensor,
        staging: torch.Tensor,
        dtype: torch.dtype,
        layout: ExpertLayout | None = None,
    ) -> None:
        """So many experts in `staging` to `expert_slots`, uint8 [count, >= bytes of an expert], on the current
        stream. `dtype`: of what is not quantised there; `layout`: the slots', if that is not `layout()`; its plain
        matrices are dequantised."""
        layout = layout or self.layout(dtype.itemsize)
        row = 0
        for there, projection, shard in self._parts_in(staging, count):
            row = 0 if shard == 0 else row
            matrix, begin = layout.matrices[projection], layout.starts[projection]
            target = expert_slots[:, begin : begin + matrix.num_bytes]
            form, inner = self.formats[projection], self._shapes[projection][1]
            some = there.shape[1] // panel_bytes(form, inner) * PANEL
            if matrix.plain:
                values = unpack(there.view(-1), form, inner, dtype).view(count, some, inner)
                target.view(dtype).view(count, -1, inner)[:, row : row + some].copy_(values)
            else:
                put_tiles(target, there, matrix, row)
            row += some

    def _parts_in(self, staging: torch.Tensor, count: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Where so many experts' packed bytes lie in `staging`: uint8 [count, bytes], by projection and shard."""
        at = 0
        for projection, parts in enumerate(self.parts):
            for shard, part in enumerate(parts):
                size = part.shape[1]
                yield staging[at : at + count * size].view(count, size), projection, shard
                at += count * size

    def pin(self) -> None:
        """Let the GPU read the memory directly; it stays pinned until `unpin`, or until nobody has this object."""
        if self._unpin is not None and self._unpin.alive:
            return
        pinned: list[int] = []
        # The layer is held until its memory is no longer pinned, then given back: never the other way round.
        self._unpin = weakref.finalize(self, _unpin, pinned, self._owner)
        self._unpin.atexit = False  # the driver does it for a process that ends
        for memory in self.shards:
            code = int(_cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
            if code:
                self.unpin()
                raise ExpertBackendError(f"pinning {memory.numel()} bytes of experts: CUDA error {code}")
            pinned.append(memory.data_ptr())

    def unpin(self) -> None:
        if self._unpin is not None:
            self._unpin()


def _unpin(addresses: list[int], owner: Any) -> None:
    for address in addresses:
        _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class PackedSource:
    """All loaded layers; pinned if the device is a GPU, until `close` or until nobody has the source."""

    def __init__(self, packed: PackedWeights, sizes: Sizes, device: torch.device) -> None:
        self._packed = packed
        self._sizes = sizes
        self._pin = device.type == "cuda"
        self._layers: dict[int, PackedLayer] = {}

    def add(self, layer: int) -> PackedLayer:
        if layer not in self._layers:
            made = PackedLayer(self._packed.layers[layer], self._sizes)
            if self._pin:
                made.pin()
            self._layers[layer] = made
        return self._layers[layer]

    def __getitem__(self, layer: int) -> PackedLayer:
        return self._layers[layer]

    def close(self) -> None:
        for layer in self._layers.values():
            layer.unpin()
        self._layers.clear()
