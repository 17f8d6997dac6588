"""Dense projections on a GPU: torch's matrix product, or one with the file's quantised weights; adapters by segmented
Triton kernels from slot tables."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.architectures.config import ModelConfig
from engine.architectures.parts.mlp import FLOAT32_MODULES
from engine.device import beside, rejoin
from engine.errors import AdapterError, EngineError
from engine.linear.base import LatentUp, Linear, LinearBackend, LoraBatch
from engine.linear.embedding import Embedding, TiledEmbedding
from engine.linear.gpu_weights import Weights, joined
from engine.linear.latent import TorchLatentUp
from engine.lora.adapter import RANK_STEP, LoraPair, padded_rank
from engine.ops.base import RowAdapters
from engine.weights.store import WeightTensor
from engine.weights.tiled.layout import Matrix, matrix_of
from engine.weights.tiled.packer import Packer

_COLUMNS = 64  # the kernels' column block: a joined projection begins at a multiple of it


def slot_table_bytes(model: ModelConfig, slots: int, rank: int, element_bytes: int) -> int:
    """Slot tables of attention, dense MLPs, shared experts (activations' type), routers and their gates (float32)."""
    narrow = wide = 0
    for layer in range(model.num_hidden_layers):
        for module in model.modules(layer):
            if module.kind == "linear" and module.name in FLOAT32_MODULES:
                wide += sum(module.shape)
            elif module.kind == "linear":
                narrow += sum(module.shape)
    return (slots + 1) * padded_rank(rank) * (narrow * element_bytes + wide * 4)


def embedding_matrix(weight: WeightTensor, element_bytes: int) -> Matrix | None:
    """How a GPU holds an embedding [V, H] that is quantised in the file; None: as a table."""
    if not weight.quantised:
        return None
    matrix = matrix_of(weight, element_bytes, None)
    return None if matrix.plain else matrix


class _Tables:
    """Adapters of P joined projections by slot, at fixed addresses: captured graphs read whatever they hold then.

    a [slots + 1, P R, in], b [slots + 1, out, R]; ranks int32 [slots + 1], 0 where a slot changes nothing here.
    """

    def __init__(self, weight: Weights, parts: int, slots: int, rank: int) -> None:
        outer, inner = weight.shape
        self.a = torch.zeros(slots + 1, parts * rank, inner, dtype=weight.dtype, device=weight.device)
        self.b = torch.zeros(slots + 1, outer, rank, dtype=weight.dtype, device=weight.device)
        self.scales = torch.zeros(slots + 1, parts, dtype=torch.float32, device=weight.device)
        self.ranks = torch.zeros(slots + 1, dtype=torch.int32, device=weight.device)
        self.held: dict[int, list[int]] = {}  # slot -> rank of each projection

    def put(self, slot: int, part: int, start: int, outer: int, pair: LoraPair | None) -> None:
        """`part` is the projection's number, its columns are [start, start + outer)."""
        rank = self.b.shape[2]
        a, b = self.a[slot, part * rank : (part + 1) * rank], self.b[slot, start : start + outer]
        held = self.held.setdefault(slot, [0] * self.scales.shape[1])
        held[part] = 0 if pair is None else pair.rank
        a.zero_()
        b.zero_()
        if pair is not None:
            a[: pair.rank].copy_(pair.a)
            b[:, : pair.rank].copy_(pair.b)
            self.scales[slot, part].fill_(pair.scale)
        self.ranks[slot].fill_(-(-max(held) // RANK_STEP) * RANK_STEP)


class _Product:
    """y = x W^T (+ bias) of one or several projections of the same x, side by side."""

    def __init__(self, weights: Weights, starts: list[int], slots: int, rank: int) -> None:
        self.weights = weights
        self.starts = starts
        self._slots = slots
        self._rank = rank
        self._made: _Tables | None = None
        self._lock = threading.Lock()  # adapters come from a thread of their own

    @property
    def tables(self) -> _Tables:
        with self._lock:
            if self._made is None:
                with torch.inference_mode(False):  # adapters are put into them outside of it
                    self._made = _Tables(self.weights, len(self.starts), self._slots, self._rank)
            return self._made

    def __call__(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        outer = self.weights.shape[0]
        if lora is None or not self._slots:
            return self.weights.multiply(x, 0, outer)
        segments = lora.segments
        if segments is None:
            raise EngineError("projections on a GPU need a LoRA batch with segments")
        from engine.linear.gpu_kernels import SegmentedLora

        t = self.tables
        added = SegmentedLora(t.a, t.b, t.ranks, t.scales, self.starts, segments.order, segments.tiles)
        part = added.shares(x)
        with beside(x.device):
            added.shrink(x, part)
        y = self.weights.multiply(x, 0, outer)
        rejoin(x.device)
        added.expand(y, part)
        return y


class GpuLinear(Linear):
    """One projection: a whole product, or a part of a joined one."""

    captures = True

    def __init__(self, name: str, product: _Product, outer: int, slots: int, rank: int) -> None:
        self.name = name
        self.product = product
        self.part = 0
        self._start = 0
        self._outer = outer
        self._slots = slots
        self._rank = rank

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]"""
        return self._outer, self.product.weights.shape[1]

    def __call__(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        if len(self.product.starts) == 1:
            return self.product(x, lora)
        if lora is None:
            return self.product.weights.multiply(x, self._start, self._outer)
        return self.product(x, lora)[:, self._start : self._start + self._outer]

    @property
    def plain(self) -> torch.Tensor | None:
        held = self.product.weights
        if held.dense is None or held.bias is not None:
            return None
        return held.dense[self._start : self._start + self._outer]

    def adapters_of(self, lora: LoraBatch) -> RowAdapters | None:
        if len(self.product.starts) > 1 or not self._slots:
            return None
        held = self.product.tables
        return RowAdapters(lora.slots, held.a, held.b, held.scales[:, 0], held.ranks)

    def numbers(self, first: int, count: int) -> torch.Tensor:
        """Rows [first, first + count) of W [out, in] in the activations' dtype."""
        return self.product.weights.numbers(self._start + first, count)

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        weight = self.plain
        if weight is None or out.dtype != x.dtype:
            super().into(x, out)
        else:
            torch.mm(x, weight.T, out=out)

    def set_adapter(self, slot: int, pair: LoraPair | None) -> None:
        if not 1 <= slot <= self._slots:
            raise EngineError(f"{self.name}: slot {slot}; allowed are 1 to {self._slots}")
        if pair is not None:
            inner, rank = self.product.weights.shape[1], pair.rank
            if rank > self._rank:
                raise AdapterError(
                    f"{self.name}: rank {rank} is over --max-adapter-rank {self._rank}", keys=[self.name]
                )
            if pair.a.shape != (rank, inner) or pair.b.shape != (self._outer, rank):
                raise AdapterError(
                    f"{self.name}: LoRA A {tuple(pair.a.shape)}, B {tuple(pair.b.shape)}; wanted [r, {inner}] and "
                    f"[{self._outer}, r]",
                    keys=[self.name],
                )
        self.product.tables.put(slot, self.part, self._start, self._outer, pair)

    def become_part(self, product: _Product, part: int) -> None:
        self.product, self.part, self._start = product, part, product.starts[part]


class GpuLatentUp(TorchLatentUp):
    """Products by heads in torch, adapters from slot tables by a kernel of their own: what a captured graph replays
    serves any adapters. Without segments, as in the expanded form, adapters go one by one as in torch."""

    captures = True

    def __init__(self, name: str, weight: torch.Tensor, heads: int, nope: int, slots: int, rank: int) -> None:
        """weight [heads x (nope + value), kv_rank]."""
        super().__init__(weight.view(heads, -1, weight.shape[1]), nope)
        product = _Product(Weights(weight.dtype, weight, (), None), [0], slots, rank)
        self._linear = GpuLinear(name, product, len(weight), slots, rank)
        self._slots = slots
        self._add: Any = None

    def absorb(self, q: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        if not self._by_segments(lora):
            return super().absorb(q, lora)
        out = super().absorb(q, None)
        a, b = self._tables()
        self._lora(out, q, b[:, :, : self._nope].transpose(2, 3), a[:, None].transpose(2, 3), lora)
        return out

    def values(self, mixed: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        if not self._by_segments(lora):
            return super().values(mixed, lora)
        out = super().values(mixed, None)
        a, b = self._tables()
        self._lora(out, mixed, a[:, None], b[:, :, self._nope :], lora)
        return out

    def set_adapter(self, slot: int, pair: LoraPair | None) -> None:
        self._linear.set_adapter(slot, pair)

    def _by_segments(self, lora: LoraBatch | None) -> bool:
        return lora is not None and lora.segments is not None and self._slots > 0

    def _tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """a [slots, R, kv_rank], b [slots, H, nope + value, R]."""
        tables = self._linear.product.tables
        return tables.a, tables.b.view(len(tables.b), len(self._keys), -1, tables.b.shape[2])

    def _lora(
        self, y: torch.Tensor, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, lora: LoraBatch | None
    ) -> None:
        if self._add is None:
            self._add = importlib.import_module("engine.linear.gpu_latent_kernels").add_latent_lora
        if lora is not None and (segments := lora.segments) is not None:
            held = self._linear.product.tables
            self._add(y, x, first, second, held.ranks, held.scales, segments.order, segments.tiles)

    def _pair(self, slot: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        if slot == 0:
            return None
        held = self._linear.product.tables
        if slot not in held.held or not any(held.held[slot]):
            return None
        a, b = self._tables()
        return a[slot].float(), b[slot].float() * held.scales[slot]


class GpuLinearBackend(LinearBackend):
    """`slots` adapters of at most `rank` each; the tables of a projection are made when it first meets an adapter.
    `pack`: holds weights as the file has them where there is a form for it, those that the file does not quantise as
    `quantise` says ("int8", "int4"); without, and otherwise, they are numbers of `dtype`.

    With joined projections a base-only batch launches one product, a mixed one two kernels more, whatever the number
    of adapters in it.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        slots: int,
        rank: int,
        quantise: str | None = None,
        pack: Packer | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._quantise = quantise
        self._pack = pack
        self._slots = slots
        self._rank = padded_rank(rank)

    def load(self, name: str, weight: WeightTensor, bias: WeightTensor | None) -> GpuLinear:
        added = None if bias is None else bias.dequantise(self.dtype).to(self.device)
        matrix = None if self._pack is None else matrix_of(weight, self.dtype.itemsize, self._quantise)
        if self._pack is None or matrix is None or matrix.plain:
            held = Weights(self.dtype, self._dense(weight), (), added)
        else:
            held = Weights(self.dtype, None, ((matrix, self._tiles(self._pack, weight, matrix)),), added)
        return GpuLinear(name, _Product(held, [0], self._slots, self._rank), held.shape[0], self._slots, self._rank)

    def _dense(self, weight: WeightTensor) -> torch.Tensor:
        if self._pack is None:
            return weight.dequantise(self.dtype).to(self.device)
        return self._pack.dense(weight, self.dtype)

    def _tiles(self, pack: Packer, weight: WeightTensor, matrix: Matrix) -> torch.Tensor:
        with torch.inference_mode(False):
            tiles = torch.empty(1, matrix.num_bytes, dtype=torch.uint8, device=self.device)
        pack.put([weight], matrix, tiles, self.dtype)
        return tiles[0]

    def latent_up(self, name: str, weight: WeightTensor, heads: int, nope: int) -> LatentUp:
        """Dequantised."""
        return GpuLatentUp(name, self._dense(weight), heads, nope, self._slots, self._rank)

    def embedding(self, name: str, weight: WeightTensor, head: Linear | None) -> Embedding | None:
        matrix = embedding_matrix(weight, self.dtype.itemsize)
        if self._pack is None or matrix is None:
            return None
        if isinstance(head, GpuLinear) and head.product.weights.dense is None:
            held, tiles = head.product.weights.tiles[0]
            return TiledEmbedding(held, tiles, self.dtype, shared=True)
        return TiledEmbedding(matrix, self._tiles(self._pack, weight, matrix), self.dtype, shared=False)

    def join(self, linears: Sequence[Linear]) -> Callable[[torch.Tensor, LoraBatch | None], list[torch.Tensor]]:
        """One product and one copy of the weights, where widths allow; otherwise one call each."""
        parts = [linear for linear in linears if isinstance(linear, GpuLinear)]
        sizes = [part.shape[0] for part in parts]
        biased = [part.product.weights.bias is not None for part in parts]
        if len(parts) != len(linears) or any(size % _COLUMNS for size in sizes[:-1]) or any(biased) != all(biased):
            return super().join(linears)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        weights = joined([part.product.weights for part in parts])
        if weights is None:
            return super().join(linears)
        product = _Product(weights, starts, self._slots, self._rank)
        for i, part in enumerate(parts):
            part.become_part(product, i)
        return lambda x, lora: list(torch.split(product(x, lora), sizes, dim=1))
