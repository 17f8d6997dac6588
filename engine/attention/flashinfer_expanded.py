"""Latent attention of long chunks by flashinfer, expanded: keys and values of all heads are made of the latents of
PIECE positions at a time, and what a query has of each piece is merged by the sums of its softmax."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.architectures.parts.mla import Latent
from engine.attention.base import BLOCK_SIZE
from engine.attention.latent import Expand

PIECE = 4096  # positions, of whole blocks
SIZES = ((128, 128), (192, 128), (256, 256))  # of keys and of values, that both fa2 and fa3 take
FROM = 512  # tokens of a sequence in a step
_MERGED = 32  # heads at most, for which one block of threads has a thread for every 8 values


@dataclass(frozen=True)
class Call:
    """Queries of a chunk that see all of a piece's keys, or (`causal`) end with its last one, one key each."""

    queries: slice
    causal: bool


def expands_from(spec: Latent) -> int | None:
    """How many tokens of a sequence in a step are computed so, at least; None: none are."""
    sizes, least = (spec.nope_dim + spec.rope_dim, spec.value_dim), spec.expands_from
    return None if sizes not in SIZES or least is None else max(FROM, least)


def piece_bytes(spec: Latent, element_bytes: int) -> int:
    """Of the keys and values of a piece; k_nope is there twice."""
    return PIECE * spec.heads * (2 * spec.nope_dim + spec.rope_dim + spec.value_dim) * element_bytes


def pieces(context: int, size: int) -> Iterator[slice]:
    for begin in range(0, context, size):
        yield slice(begin, min(begin + size, context))


def calls(piece: slice, tokens: int, context: int) -> Iterator[Call]:
    """Of the last `tokens` of `context` positions with the keys of a piece: those that lie in it, then those behind."""
    before = context - tokens
    begin, end = (min(max(at - before, 0), tokens) for at in (piece.start, piece.stop))
    if begin < end:
        yield Call(slice(begin, end), True)
    if end < tokens:
        yield Call(slice(end, tokens), False)


class Expanded:
    """`backend`: fa2 or fa3. Its kernel is compiled and tried when this is made."""

    def __init__(self, spec: Latent, backend: str, device: torch.device, dtype: torch.dtype) -> None:
        library: Any = importlib.import_module("flashinfer")
        self._attend, self._merge = library.single_prefill_with_kv_cache, library.merge_state_in_place
        self._spec, self._backend, self._piece = spec, backend, PIECE
        self._few = math.gcd(spec.heads, _MERGED)
        q = torch.zeros(1, spec.heads, spec.nope_dim + spec.rope_dim, dtype=dtype, device=device)
        self._run(q, q, q[..., : spec.value_dim].contiguous(), True)

    def __call__(
        self, kept: torch.Tensor, blocks: torch.Tensor, context: int, q: torch.Tensor, expand: Expand
    ) -> torch.Tensor:
        """q [T, H, nope + rope], of the last tokens of a sequence whose `context` positions are in `blocks` (int64) of
        kept [num_blocks, BLOCK_SIZE, width] -> [T, H, value]."""
        spec = self._spec
        out = q.new_empty((*q.shape[:2], spec.value_dim))
        sums = q.new_empty(q.shape[:2], dtype=torch.float32)
        for piece in pieces(context, self._piece):
            within = blocks[piece.start // BLOCK_SIZE : -(-piece.stop // BLOCK_SIZE)]
            latents = kept[within].flatten(0, 1)[: piece.stop - piece.start]
            k_nope, values = expand(latents[:, : spec.kv_rank])
            v = values.contiguous()
            k = q.new_empty((len(latents), *q.shape[1:]))
            k[..., : spec.nope_dim] = k_nope
            k[..., spec.nope_dim :] = latents[:, None, spec.kv_rank :]
            for call in calls(piece, len(q), context):
                got, of_got = self._run(q[call.queries], k, v, call.causal)
                if piece.start == 0:
                    out[call.queries], sums[call.queries] = got, of_got
                else:
                    parts = (out[call.queries], sums[call.queries], got, of_got)
                    self._merge(*(part.view(-1, self._few, *part.shape[2:]) for part in parts))
        return out

    def _run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Sequence[torch.Tensor]:
        """[T, H, value], and the logarithms of the softmax's sums [T, H]. Causal: the last query sees the last key."""
        found: Sequence[torch.Tensor] = self._attend(
            q, k, v, causal=causal, sm_scale=self._spec.scale, return_lse=True, backend=self._backend
        )
        return found
