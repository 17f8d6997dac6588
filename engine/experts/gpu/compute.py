"""Launches the GPU's expert kernels for a layer, in tiles that fit the batch; owns the scratch memory they share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from engine.errors import EngineError
from engine.experts.base import ExpertBuffers
from engine.experts.gpu import products
from engine.experts.gpu.few_lora import FewLora, shares
from engine.experts.gpu.few_rows import FewRows
from engine.experts.gpu.index import MOST_CHOICES, Index, add_touched, build, most_blocks
from engine.experts.gpu.layout import SILU_ALONE, Elementwise, ExpertLayout, Sizes
from engine.experts.gpu.nvrtc import Kernel
from engine.experts.gpu.products import (
    FEW_EACH,
    LEAST_BLOCK_ROWS,
    MIDDLE_EACH,
    Product,
    Tiles,
    choice_products,
    choices_alone,
    plain_down,
    plain_gate_up,
    tiled_products,
    tiles_for,
)
from engine.experts.gpu.widened import ROWS as WIDENED_EACH
from engine.experts.gpu.widened import Widened
from engine.lora.adapter import RANK_STEP, padded_rank

CHUNK_ROWS = 8192  # rows computed at a time: bounds the scratch memory
WIDE_ROWS = 4096  # of a chunk, up to which a choice's result is kept in float32 before a row's are added up
_F32 = 4


def chunk_lengths(experts: int, top_k: int) -> list[int]:
    """Rows of chunks, rising, the fewest of each way: by larger blocks, as plain numbers, or with narrower results than
    fewer rows are computed."""
    first = {WIDE_ROWS + 1, -(-WIDENED_EACH * experts // top_k)}
    first |= {each * experts // top_k + 1 for each in (FEW_EACH, MIDDLE_EACH)}
    return sorted(rows for rows in first if rows <= CHUNK_ROWS)


Parts: TypeAlias = Iterable[tuple[Product, torch.Tensor]]  # products, and the expert slots [E] of the experts in each


@dataclass(frozen=True)
class LayerTables:
    """A layer as the kernels find it, all on the device and free to change between steps."""

    expert_slots: torch.Tensor  # [F, >= bytes of an expert] uint8, or the same memory in the model's dtype
    # int32 [adapter slots, E]: expert slot of an expert for rows of an adapter slot, -1 if another backend computes it
    place: torch.Tensor
    lora_address: torch.Tensor  # int64 [slots, E]: an expert's LoRA block, 0 if it has none
    layout: ExpertLayout | None = None  # how an expert lies in its slot; None: plain numbers of the model's dtype
    touched: torch.Tensor | None = None  # int64 []: calls add their distinct experts, of which none is elsewhere
    elementwise: Elementwise = SILU_ALONE

    @property
    def biased(self) -> bool:
        return self.elementwise.biases is not None

    @property
    def biases(self) -> torch.Tensor:
        """For kernels, which read nothing of it where there are none."""
        return self.place if self.elementwise.biases is None else self.elementwise.biases


@dataclass(frozen=True)
class SlotTables:
    """What an adapter has in all layers."""

    ranks: torch.Tensor  # int32 [slots], padded
    scales: torch.Tensor  # float32 [layers, slots, 3]: gate, up, down

    @classmethod
    def allocate(cls, layers: int, slots: int, device: torch.device) -> SlotTables:
        return cls(torch.zeros(slots, dtype=torch.int32, device=device), torch.zeros(layers, slots, 3, device=device))


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
        self._h = torch.empty(self.rows * sizes.top_k, sizes.inner, dtype=dtype, device=device)
        few = _few_choices(sizes, self.rows)
        self._t = torch.empty(self.rows * sizes.top_k, 2 * self.max_rank, dtype=torch.float32, device=device)
        self._t_down = torch.empty(few, shares(sizes), self.max_rank, dtype=torch.float32, device=device)
        self._y = torch.empty(_result_bytes(sizes, dtype.itemsize, self.rows), dtype=torch.uint8, device=device)
        self._widened = Widened(sizes, dtype, device)
        self._few_rows = FewRows(sizes, device)
        self._by_choice: tuple[ExpertBuffers, torch.Tensor] | None = None  # the last batch, if it has no index
        self._index = Index.allocate(self.rows, sizes.top_k, sizes.experts, LEAST_BLOCK_ROWS, device)

    @property
    def num_bytes(self) -> int:
        held = self._h, self._t, self._t_down, self._y
        return sum(t.numel() * t.element_size() for t in held) + self._widened.num_bytes

    @staticmethod
    def planned_bytes(sizes: Sizes, element_bytes: int, max_rows: int, max_rank: int, *, quantised: bool) -> int:
        """`num_bytes`, once a batch of `max_rows` was computed, of experts that are quantised or not."""
        rows = min(max_rows, CHUNK_ROWS)
        rank = padded_rank(max(max_rank, 1))
        narrow = (rows * sizes.top_k * 2 + _few_choices(sizes, rows) * shares(sizes)) * rank * _F32
        widened = Widened.planned_bytes(sizes, element_bytes) if quantised and Widened.pays(sizes, rows) else 0
        inner = rows * sizes.top_k * sizes.inner * element_bytes
        return inner + narrow + _result_bytes(sizes, element_bytes, rows) + widened

    def weight_passes(self) -> int:
        """How often the last batch (its last chunk) goes through the weights of an expert: once for each block of an
        expert's rows, whatever adapters they have, or for each choice. Waits for the device."""
        if self._by_choice is None:
            return int(self._index.num_blocks)
        b, place = self._by_choice
        ids = b.ids[: int(b.bsz)].long()
        expert_slots = place[b.slots[: len(ids), None].long(), ids.clamp(min=0)]
        return int(((ids >= 0) & (expert_slots >= 0)).sum())

    def run(
        self, b: ExpertBuffers, layer: LayerTables, slots: SlotTables, number: int, out: torch.Tensor, lora: bool
    ) -> None:
        """out [M, H] = the rows' experts that `layer.place` holds. `number`: the layer's row in the slot tables.
        `lora`: whether any row may have an adapter."""
        rows, touched = b.launch_rows, layer.touched
        if touched is not None and (rows > self.rows or rows * self.sizes.top_k > MOST_CHOICES):
            add_touched(touched, b.bsz, b.ids[:rows], self.sizes.experts)
            touched = None  # done for all chunks
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
            self._run(part, layer, slots, number, lora, touched)

    def _run(
        self,
        b: ExpertBuffers,
        layer: LayerTables,
        slots: SlotTables,
        number: int,
        lora: bool,
        touched: torch.Tensor | None,
    ) -> None:
        from engine.experts.gpu import index_kernel, kernels, lora_kernels

        s, tiles, index = self.sizes, tiles_for(self.sizes, b.max_rows, self.dtype), self._index
        self._by_choice = None
        within = lora and tiles.each > products.BESIDE_EACH  # adapters within the products
        adapters = None
        if lora and not within:
            adapters = FewLora(s, b, self._t, self._t_down, layer.lora_address, slots.ranks, slots.scales[number])
        if not within and (few := self._few_rows_kernels(layer, tiles, lora, b.out.dtype)):
            self._run_few_rows(b, layer, *few, touched, adapters)
            return
        if not within and (single := choice_products(layer.layout, layer.expert_slots, tiles, self.dtype, s)):
            self._run_choices(b, layer, *single, touched, adapters)
            return
        blocks = most_blocks(b.ids.numel(), s.experts, tiles.bm)
        wide: dict[str, Any] = {"H": s.hidden, "MID": s.inner, "K": s.top_k, "E": s.experts, "T": 2 * self.max_rank}
        wide |= {"BM": tiles.bm, "R": RANK_STEP, "LORA": within, "BIASED": layer.biased}
        sorted_choices = (index.order, index.start, index.block_expert, index.block_first, index.num_blocks)
        tables = (b.slots, *sorted_choices, layer.lora_address, slots.ranks)
        gates, downs = self._products(layer, tiles, b.max_rows)
        y = self._y.view(torch.float32 if b.max_rows <= WIDE_ROWS else self.dtype)

        def lora_a(x: torch.Tensor, is_down: bool) -> None:
            lora_kernels.lora_a[(blocks, self.max_rank // RANK_STEP * (1 if is_down else 2))](
                x, self._t, *tables, slots.scales[number], H=s.hidden, MID=s.inner, K=s.top_k, E=s.experts,
                T=2 * self.max_rank, DOWN=is_down, BM=tiles.bm, BK=tiles.bk_inner if is_down else tiles.bk_hidden,
                ROWS=RANK_STEP, num_warps=4, num_stages=3,
            )  # fmt: skip

        if b.ids.numel() > MOST_CHOICES:
            build(index, b.bsz, b.ids, b.slots, layer.place, tiles.bm)
        else:
            index_kernel.launch(index, b.bsz, b.ids, b.slots, layer.place, tiles.bm, touched)
        if within:
            lora_a(b.hidden, False)
        with nullcontext() if adapters is None else adapters.narrowed():
            for gate_up, place in gates:
                gate_up.kernel[gate_up.grid(blocks, s.inner)](
                    b.hidden, gate_up.expert_slots, place, self._h if adapters is None else self._raw, self._t,
                    layer.biases, *tables, **wide, **layer.elementwise.constants, RAW=adapters is not None,
                    BN=gate_up.columns, **gate_up.constants,
                )  # fmt: skip
        if adapters is not None:
            adapters.activate(self._raw, self._h, layer.elementwise)
        elif within:
            lora_a(self._h, True)
        for down, place in downs:
            down.kernel[down.grid(blocks, s.hidden)](
                self._h, down.expert_slots, place, y, self._t, b.weights, layer.biases, *tables, **wide,
                BN=down.columns, **down.constants,
            )  # fmt: skip
        if adapters is not None:
            adapters.combine(self._h, y, layer.place)
            return
        kernels.combine[(b.max_rows, -(-s.hidden // 1024))](
            b.bsz,
            b.ids,
            b.slots,
            layer.place,
            y,
            b.out,
            H=s.hidden,
            K=s.top_k,
            E=s.experts,
            BLOCK=1024,
            num_warps=4,
        )

    @property
    def _raw(self) -> torch.Tensor:
        """Of few rows, float32 [N, 2 I]: what gate and up gave. It is not needed any more when down begins."""
        return self._y.view(torch.float32)

    def _few_rows_kernels(
        self, layer: LayerTables, tiles: Tiles, lora: bool, out: torch.dtype
    ) -> tuple[Kernel, Kernel] | None:
        if layer.layout is None or not choices_alone(layer.layout, tiles, self.dtype, cuda=True):
            return None
        slot_bytes = layer.expert_slots.stride(0) * layer.expert_slots.element_size()
        rank = self.max_rank if lora else 0
        return self._few_rows.kernels(layer.layout, layer.elementwise, slot_bytes, rank, out)

    def _run_few_rows(
        self,
        b: ExpertBuffers,
        layer: LayerTables,
        gate_up: Kernel,
        down: Kernel,
        touched: torch.Tensor | None,
        adapters: FewLora | None,
    ) -> None:
        s, expert_slots, biases = self.sizes, layer.expert_slots, layer.elementwise.biases
        self._by_choice = b, layer.place
        tables = (b.bsz, b.ids, b.slots, layer.place)
        inner = self._h if adapters is None else self._raw
        with nullcontext() if adapters is None else adapters.narrowed():
            grid = b.ids.numel(), s.inner // gate_up.columns
            gate_up.launch(grid, (*tables, touched, b.hidden, expert_slots, inner, biases))
        grid = b.max_rows, s.hidden // down.columns
        added: tuple[torch.Tensor | None, ...] = (None,) * 3
        if adapters is not None:
            adapters.activate(self._raw, self._h, layer.elementwise)
            added = (adapters.t_down, adapters.address, adapters.ranks)
        down.launch(grid, (*tables, self._h, b.weights, expert_slots, b.out, biases, *added))

    def _run_choices(
        self,
        b: ExpertBuffers,
        layer: LayerTables,
        gate_up: Product,
        down: Product,
        touched: torch.Tensor | None,
        adapters: FewLora | None,
    ) -> None:
        s = self.sizes
        self._by_choice = b, layer.place
        common: dict[str, Any] = {"H": s.hidden, "MID": s.inner, "K": s.top_k, "E": s.experts}
        common |= {"BIASED": layer.biased}
        tables = (b.bsz, b.ids, b.slots, layer.place)
        inner = self._h if adapters is None else self._raw
        with nullcontext() if adapters is None else adapters.narrowed():
            gate_up.kernel[gate_up.grid(b.ids.numel(), s.inner)](
                *tables, b.bsz if touched is None else touched, b.hidden, gate_up.expert_slots, inner,
                layer.biases, **common, **layer.elementwise.constants, RAW=adapters is not None,
                EP=1 << (s.experts - 1).bit_length(), COUNT=touched is not None, BN=gate_up.columns,
                **gate_up.constants,
            )  # fmt: skip
        added: tuple[torch.Tensor, ...] = (b.weights,) * 3
        constants = {"T": 1, "SHARES": 1, "R": 1}
        if adapters is not None:
            adapters.activate(self._raw, self._h, layer.elementwise)
            added, constants = (adapters.t_down, adapters.address, adapters.ranks), adapters.constants
        down.kernel[down.grid(b.max_rows, s.hidden)](
            *tables, self._h, b.weights, down.expert_slots, b.out, layer.biases, *added, **(constants | common),
            LORA=adapters is not None, J=1 << (s.top_k - 1).bit_length(), BN=down.columns, **down.constants,
        )  # fmt: skip

    def _products(self, layer: LayerTables, tiles: Tiles, rows: int) -> tuple[Parts, Parts]:
        """How gate and up, and down, of so many rows are computed."""
        s, layout, place = self.sizes, layer.layout, layer.place[0]
        if layout is None or layout.plain:
            numbers = layer.expert_slots.view(self.dtype)
            down = plain_down(numbers, 2 * s.hidden * s.inner, s, tiles)
            return [(plain_gate_up(numbers, s, tiles), place)], [(down, place)]
        expert_slots = layer.expert_slots.view(torch.uint8)
        if Widened.pays(s, rows) and not any(matrix.plain for matrix in layout.matrices):
            both = self._widened.parts(expert_slots, place, 0, layout.gate, layout.up)
            last = self._widened.parts(expert_slots, place, layout.starts[2], layout.down)
            return (
                ((plain_gate_up(plain, s, tiles), here) for plain, here in both),
                ((plain_down(plain, 0, s, tiles), here) for plain, here in last),
            )
        gate_up, down = tiled_products(layout, expert_slots, tiles, self.dtype)
        return [(gate_up, place)], [(down, place)]


def _result_bytes(sizes: Sizes, element_bytes: int, rows: int) -> int:
    """A row for each choice: float32 in few rows, in more the activations' own type; before it, of few rows with
    adapters, what gate and up gave."""
    results = max(min(rows, WIDE_ROWS) * _F32, rows * element_bytes) * sizes.top_k * sizes.hidden
    raw = _few_choices(sizes, rows) * 2 * sizes.inner * _F32
    return max(results, -(-raw // (_F32 * sizes.hidden)) * _F32 * sizes.hidden)


def _few_choices(sizes: Sizes, rows: int) -> int:
    """Of a step whose adapters are beside the products, at most."""
    return min(rows * sizes.top_k, math.ceil(products.BESIDE_EACH * sizes.experts))
