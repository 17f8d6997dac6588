"""Latent attention on an NVIDIA GPU by flashinfer: its MLA kernels, absorbed, with graphs for padded batches; chunks of
many tokens expanded."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from engine.architectures.parts.mla import Latent
from engine.attention import flashinfer
from engine.attention.base import BLOCK_SIZE, BatchLayout, joined, unit_bytes
from engine.attention.flashinfer import PREFILLS, fa3_limit
from engine.attention.flashinfer_expanded import Expanded, expands_from
from engine.attention.latent import Expand, LatentBackend
from engine.errors import EngineError, UserError

_TILES = 8192  # of 64 queries x heads that one wrapper is given; its arrays hold 16384, whole or cut
_TILE = 64


@dataclass(frozen=True)
class Piece:
    """Tokens of a span that one call computes: where each row's begin, its blocks and its positions behind them."""

    tokens: slice
    starts: NDArray[np.int64]  # [rows + 1], from 0
    pages: NDArray[np.int64]  # [rows + 1], from 0
    blocks: NDArray[np.int32]
    lengths: NDArray[np.int64]  # [rows]


def pieces(batch: BatchLayout, span: Sequence[int], heads: int) -> Iterator[Piece]:
    """Rows that follow one another, cut so that each call's work fits into a wrapper's arrays; a long row is cut, too.
    Tokens count from the first row's first."""
    most, taken = max(_TILES * _TILE // heads, 1), 0
    rows: list[tuple[int, int, int]] = []  # (row, from, to) of its tokens
    for row in span:
        begin, end = batch.row_starts[row : row + 2]
        while begin < end:
            size = min(end - begin, most - taken)
            rows.append((row, begin, begin + size))
            begin, taken = begin + size, taken + size
            if taken == most:
                yield _piece(batch, rows, batch.row_starts[span[0]])
                rows, taken = [], 0
    if rows:
        yield _piece(batch, rows, batch.row_starts[span[0]])


def _piece(batch: BatchLayout, rows: list[tuple[int, int, int]], origin: int = 0) -> Piece:
    first = rows[0][1]
    # The cache holds all of the step's tokens before the first call: a row cut short ends at its own last position.
    lengths = np.array([batch.context_lens[row] - (batch.row_starts[row + 1] - end) for row, _, end in rows])
    counts = -(-lengths // BLOCK_SIZE)
    blocks = joined([batch.block_tables[row] for row, _, _ in rows], counts.tolist())
    starts = np.array([first, *(end for _, _, end in rows)]) - first
    return Piece(
        slice(first - origin, rows[-1][2] - origin), starts, np.concatenate(([0], np.cumsum(counts))), blocks, lengths
    )


@dataclass(frozen=True)
class Long:
    """A sequence whose tokens of the step are computed expanded: its blocks (int64), with `context` positions."""

    tokens: slice
    blocks: torch.Tensor
    context: int


Work = list[tuple[Any, slice]]  # wrappers, and the tokens that each computes


class FlashInferLatentAttention(LatentBackend):
    """What is kept of each of `layers`, all of one `spec`: a tensor [num_blocks, BLOCK_SIZE, width] bf16 on the GPU,
    of which the kernel reads latents and rotated parts as two views.

    A padded decode batch uses a wrapper of its own size, whose arrays stay where they are, so a captured `forward`
    replays after any later `plan` of that size. Rows of any other batch are cut into pieces that a wrapper's arrays
    hold; those of `expand_from` tokens and more are expanded (None: none are; by default where that is faster).
    `prefill`: fa2, fa3 (Hopper), or auto, for all rows. UserError for shapes and dtypes that flashinfer does not take,
    if it is not installed, or for "fa3" where that cannot be had."""

    captures = rows_share = True

    def __init__(
        self,
        spec: Latent,
        layers: Sequence[int],
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        max_row_blocks: int,
        *,
        prefill: str = "auto",
        expand_from: int | Literal["auto"] | None = "auto",
    ) -> None:
        flashinfer.require_flashinfer(spec, dtype)
        mla: Any = importlib.import_module("flashinfer.mla")
        self._make: Any = mla.BatchMLAPagedAttentionWrapper
        shape = (num_blocks, BLOCK_SIZE, spec.width)
        self.cache = {layer: torch.zeros(shape, dtype=dtype, device=device) for layer in layers}
        self._spec, self._device, self._dtype = spec, device, dtype
        self._token_bytes = len(layers) * spec.cache.position_bytes(dtype.itemsize)
        self._workspace = torch.zeros(flashinfer.WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._any: list[Any] = []  # wrappers of pieces
        self._decode: dict[int, Any] = {}  # by rows
        # What decode wrappers read. Sequences that share a prefix list its blocks each.
        self._starts = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self._pages = torch.zeros_like(self._starts)
        self._lengths = torch.zeros_like(self._starts)
        self._blocks = torch.zeros(max_rows * max_row_blocks, dtype=torch.int32, device=device)
        self._planned: list[Work] = []  # of each of `shorts`
        self._long: list[Long] = []
        self._slots: torch.Tensor | None = None
        cuda: Any = torch.cuda
        self._copied: Any = cuda.Event()  # the arrays of the last plan have left the host
        self._backend, note = self._choose(prefill, fa3_limit(cuda.get_device_capability(device), dtype))
        self._from = expands_from(spec) if expand_from == "auto" else expand_from
        self._expand = None if self._from is None else Expanded(spec, self._backend, device, dtype)
        expands = "" if self._from is None else f"; expanded from {self._from} tokens of a sequence on"
        self.notes = (note + expands,)

    def _choose(self, asked: str, limit: str | None) -> tuple[str, str]:
        """The kernel, compiled and tried, and what is used, in words."""
        if asked not in PREFILLS:
            raise UserError(f"prefill {asked!r}: allowed are {', '.join(PREFILLS)}", field="rules")
        if asked != "fa2" and limit is None:
            try:
                self._try("fa3")
            except (RuntimeError, OSError, ValueError) as error:  # what its build and its loader raise
                limit = f"fa3 could not be built: {flashinfer.first_error(error)}"
            else:
                return "fa3", "latent attention: flashinfer fa3, absorbed"
        if asked == "fa3":
            raise UserError(f"prefill fa3: {limit}; use auto or fa2", field="rules")
        why = "as the rules say" if asked == "fa2" else limit
        return "fa2", f"latent attention: flashinfer fa2, absorbed ({why})"

    def _try(self, backend: str) -> None:
        """One row over one block that nobody has written: the kernels are compiled and have run."""
        wrapper, spec = self._make(self._workspace, backend=backend), self._spec
        one = np.ones(1, np.int64)
        self._plan_wrapper(wrapper, Piece(slice(0, 1), np.arange(2), np.arange(2), np.zeros(1, np.int32), one))
        q = torch.zeros(1, spec.heads, spec.width, dtype=self._dtype, device=self._device)
        self._run(wrapper, next(iter(self.cache)), q, q[..., : spec.kv_rank].contiguous())
        torch.cuda.synchronize(self._device)

    @property
    def kv_bytes_per_token(self) -> int:
        return self._token_bytes

    def device_planes(self) -> list[torch.Tensor]:
        return [unit_bytes(tensor) for tensor in self.cache.values()]

    def plan(self, batch: BatchLayout) -> None:
        """Waits until the GPU has taken the arrays of the plan before, which by then it has as a rule."""
        self._copied.synchronize()
        if batch.padded:
            rows, every = batch.num_rows, [(row, row, row + 1) for row in range(batch.num_rows)]
            piece = _piece(batch, every)
            if len(piece.blocks) > len(self._blocks):
                raise EngineError(f"attention: {len(piece.blocks)} blocks in a step, {len(self._blocks)} at most")
            if rows not in self._decode:
                self._decode[rows] = self._wrapper(rows)
            self._long, work = [], [[(self._decode[rows], piece)]]
        else:
            self._long, work = self._cut(batch)
        for wrapper, piece in chain.from_iterable(work):
            self._plan_wrapper(wrapper, piece)
        self._planned = [[(wrapper, piece.tokens) for wrapper, piece in span] for span in work]
        self.longs = [long.tokens for long in self._long]
        self._slots = batch.slot_mapping
        self._copied.record()

    def _cut(self, batch: BatchLayout) -> tuple[list[Long], list[list[tuple[Any, Piece]]]]:
        """Sequences that are expanded, and work for those between."""
        longs: list[Long] = []
        spans: list[list[int]] = []  # rows that follow one another
        for row, (begin, end) in enumerate(pairwise(batch.row_starts)):
            if self._from is not None and end - begin >= self._from:
                longs.append(self._as_long(batch, row))
            elif spans and spans[-1][-1] == row - 1:
                spans[-1].append(row)
            else:
                spans.append([row])
        cut = [list(pieces(batch, span, self._spec.heads)) for span in spans]
        while len(self._any) < sum(map(len, cut)):
            self._any.append(self._make(self._workspace, backend=self._backend))
        self.shorts = [slice(batch.row_starts[span[0]], batch.row_starts[span[-1] + 1]) for span in spans]
        wrappers = iter(self._any)
        return longs, [[(next(wrappers), piece) for piece in span] for span in cut]

    def _as_long(self, batch: BatchLayout, row: int) -> Long:
        context, begin, end = batch.context_lens[row], *batch.row_starts[row : row + 2]
        blocks = joined([batch.block_tables[row]], [-(-context // BLOCK_SIZE)])
        return Long(slice(begin, end), flashinfer.pinned(blocks).to(self._device, torch.int64), context)

    def _wrapper(self, rows: int) -> Any:
        return self._make(
            self._workspace,
            use_cuda_graph=True,
            qo_indptr=self._starts[: rows + 1],
            kv_indptr=self._pages[: rows + 1],
            kv_indices=self._blocks,
            kv_len_arr=self._lengths[:rows],
            backend=self._backend,
        )

    def _plan_wrapper(self, wrapper: Any, piece: Piece) -> None:
        spec, pinned = self._spec, flashinfer.pinned
        wrapper.plan(
            pinned(piece.starts),
            pinned(piece.pages),
            pinned(piece.blocks),
            pinned(piece.lengths),
            spec.heads,
            spec.kv_rank,
            spec.rope_dim,
            BLOCK_SIZE,
            True,  # causal
            spec.scale,
            self._dtype,
            self._dtype,
        )

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._long:
            raise EngineError("attention: this step has sequences that are computed expanded")
        self.keep(layer, k)
        return self.absorbed(layer, 0, q)

    def keep(self, layer: int, kept: torch.Tensor) -> None:
        if self._slots is None:
            raise EngineError("attention: plan() comes before forward()")
        self.cache[layer].flatten(0, 1)[self._slots] = kept[:, 0]

    def absorbed(self, layer: int, number: int, q: torch.Tensor) -> torch.Tensor:
        out = torch.empty((*q.shape[:2], self._spec.kv_rank), dtype=q.dtype, device=q.device)
        for wrapper, tokens in self._planned[number]:
            self._run(wrapper, layer, q[tokens], out[tokens])
        return out

    def expanded(self, layer: int, number: int, q: torch.Tensor, expand: Expand) -> torch.Tensor:
        long = self._long[number]
        if self._expand is None:
            raise EngineError("attention: nothing is computed expanded here")
        return self._expand(self.cache[layer], long.blocks, long.context, q, expand)

    def _run(self, wrapper: Any, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        rank, kept = self._spec.kv_rank, self.cache[layer]
        wrapper.run(q[..., :rank], q[..., rank:], kept[..., :rank], kept[..., rank:], out=out)
