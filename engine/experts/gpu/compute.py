"""Launches the GPU's expert kernels for a layer, in tiles that fit the batch; owns the scratch memory they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import EngineError
from engine.experts.base import ExpertBuffers
from engine.experts.gpu.index import MOST_CHOICES, Index, build, most_blocks
from engine.experts.gpu.layout import Sizes
from engine.lora.ranks import RANK_STEP, padded_rank

CHUNK_ROWS = 4096  # rows computed at a time: bounds the scratch memory
LEAST_BLOCK_ROWS = 16  # of all tiles
_F32 = 4


@dataclass(frozen=True)
class LayerTables:
    """A layer as the kernels find it, all on the device and free to change between steps."""

    frames: torch.Tensor  # model dtype [F, frame]
    place: torch.Tensor  # int32 [slots, E]: frame of an expert for rows of a slot, -1 if another backend computes it
    lora_address: torch.Tensor  # int64 [slots, E]: an expert's LoRA block, 0 if it has none


@dataclass(frozen=True)
class SlotTables:
    """What an adapter has in all layers."""

    ranks: torch.Tensor  # int32 [slots], padded
    scales: torch.Tensor  # float32 [layers, slots, 3]: gate, up, down

    @classmethod
    def allocate(cls, layers: int, slots: int, device: torch.device) -> SlotTables:
        return cls(torch.zeros(slots, dtype=torch.int32, device=device), torch.zeros(layers, slots, 3, device=device))


@dataclass(frozen=True)
class _Tiles:
    """Tile sizes for an average of so many rows per expert. `bn` and `bk` divide the model's sizes."""

    bm: int
    bn_gate_up: int
    bn_down: int
    bk_hidden: int
    bk_inner: int
    warps: int
    stages: int


class GpuCompute:
    """`max_rank` bounds the adapters, `max_rows` the batches. One stream at a time uses an object.

    bf16 or float32; products accumulate in float32 (float32 operands are not rounded to tf32).
    """

    def __init__(
        self, sizes: Sizes, dtype: torch.dtype, device: torch.device, *, max_rows: int, max_rank: int, max_slots: int
    ) -> None:
        if dtype not in (torch.bfloat16, torch.float32):
            raise EngineError(f"dtype {dtype}: experts on a GPU take bfloat16 and float32")
        self.sizes = sizes
        self.dtype = dtype
        self.device = device
        self.max_slots = max_slots + 1  # with the base
        self.max_rank = padded_rank(max(max_rank, 1))
        self.rows = min(max_rows, CHUNK_ROWS)
        n = self.rows * sizes.top_k
        self._h = torch.empty(n, sizes.inner, dtype=dtype, device=device)
        self._t = torch.empty(n, 2 * self.max_rank, dtype=dtype, device=device)
        self._y = torch.empty(n, sizes.hidden, dtype=torch.float32, device=device)
        self._index = Index.allocate(self.rows, sizes.top_k, sizes.experts, LEAST_BLOCK_ROWS, device)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self._h, self._t, self._y))

    @staticmethod
    def planned_bytes(sizes: Sizes, element_bytes: int, max_rows: int, max_rank: int) -> int:
        """`num_bytes` before there is one."""
        narrow = sizes.inner + 2 * padded_rank(max(max_rank, 1))
        return min(max_rows, CHUNK_ROWS) * sizes.top_k * (narrow * element_bytes + sizes.hidden * _F32)

    def weight_passes(self) -> int:
        """How often the last batch (its last chunk) goes through the weights of an expert: once for each block of an
        expert's rows, whatever adapters they have. Waits for the device."""
        return int(self._index.num_blocks)

    def run(
        self, b: ExpertBuffers, layer: LayerTables, slots: SlotTables, number: int, out: torch.Tensor, lora: bool
    ) -> None:
        """out [M, H] = the rows' experts that `layer.place` holds. `number`: the layer's row in the slot tables.
        `lora`: whether any row may have an adapter."""
        rows = b.launch_rows
        for first in range(0, rows, self.rows):
            last = min(first + self.rows, rows)
            bsz = b.bsz if first == 0 else (b.bsz - first).clamp(min=0)
            part = ExpertBuffers(
                bsz,
                b.ids[first:last],
                b.weights[first:last],
                b.slots[first:last],
                b.hidden[first:last],
                out[first:last],
            )
            self._run(part, layer, slots, number, lora)

    def _run(self, b: ExpertBuffers, layer: LayerTables, slots: SlotTables, number: int, lora: bool) -> None:
        from engine.experts.gpu import index_kernel, kernels

        s, tiles, index = self.sizes, self._tiles(b.max_rows), self._index
        fill = build if b.ids.numel() > MOST_CHOICES else index_kernel.launch
        fill(index, b.bsz, b.ids, b.slots, layer.place, tiles.bm)
        tables = (index.order, index.start, index.block_expert, index.block_first, index.num_blocks)
        blocks = most_blocks(b.ids.numel(), s.experts, tiles.bm)
        common: dict[str, Any] = {"H": s.hidden, "MID": s.inner, "K": s.top_k, "E": s.experts}
        common |= {"T": 2 * self.max_rank, "BM": tiles.bm}
        wide: dict[str, Any] = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        address, ranks = layer.lora_address, slots.ranks
        a_tiles = self.max_rank // RANK_STEP

        def lora_a(x: torch.Tensor, is_down: bool) -> None:
            kernels.lora_a[(blocks, a_tiles if is_down else 2 * a_tiles)](
                x, self._t, b.slots, *tables, address, ranks, slots.scales[number],
                **common, DOWN=is_down, BK=tiles.bk_inner if is_down else tiles.bk_hidden, ROWS=RANK_STEP,
                num_warps=4, num_stages=3,
            )  # fmt: skip

        if lora:
            lora_a(b.hidden, False)
        kernels.gate_up[(blocks, s.inner // tiles.bn_gate_up)](
            b.hidden, layer.frames, layer.place, self._h, self._t, b.slots, *tables, address, ranks,
            **common, LORA=lora, BN=tiles.bn_gate_up, BK=tiles.bk_hidden, R=RANK_STEP, **wide,
        )  # fmt: skip
        if lora:
            lora_a(self._h, True)
        kernels.down[(blocks, s.hidden // tiles.bn_down)](
            self._h, layer.frames, layer.place, self._y, self._t, b.weights, b.slots, *tables, address, ranks,
            **common, LORA=lora, BN=tiles.bn_down, BK=tiles.bk_inner, R=RANK_STEP, **wide,
        )  # fmt: skip
        kernels.combine[(b.max_rows, -(-s.hidden // 1024))](
            b.bsz,
            b.ids,
            b.slots,
            layer.place,
            self._y,
            b.out,
            H=s.hidden,
            K=s.top_k,
            E=s.experts,
            BLOCK=1024,
            num_warps=4,
        )

    def _tiles(self, rows: int) -> _Tiles:
        s = self.sizes

        def divisor(size: int, most: int) -> int:
            return next(d for d in (most, most // 2, most // 4, 32) if size % d == 0 and d >= 32)

        float32 = self.dtype == torch.float32
        bk = 32 if float32 else 128
        each = rows * s.top_k / s.experts
        if each <= 16:
            bm, bn = LEAST_BLOCK_ROWS, 32
            return _Tiles(
                bm, divisor(s.inner, bn), divisor(s.hidden, bn), divisor(s.hidden, bk), divisor(s.inner, bk), 4, 3
            )
        bm, bn = (64, 64) if each <= 96 or float32 else (128, 64)
        bk = 32 if float32 else 64
        return _Tiles(
            bm, divisor(s.inner, bn), divisor(s.hidden, 2 * bn), divisor(s.hidden, bk), divisor(s.inner, bk),
            8 if bm == 128 else 4, 3,
        )  # fmt: skip
