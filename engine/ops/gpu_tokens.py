"""The two ends of a decode step: the tokens that it begins with, and each row's greedy token."""

import torch
import triton
import triton.language as tl

_BLOCK = 4096  # logits of a program


@triton.jit
def _next_ids(ids, sources, sampled, out, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + row, row < rows, other=-1)
    known = tl.load(ids + row, row < rows, other=0)
    token = tl.load(sampled + source, source >= 0, other=0)
    tl.store(out + row, tl.where(source >= 0, tl.maximum(token, 0), known), row < rows)


def next_ids(ids: torch.Tensor, sources: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """int64 [T]: sampled[source] where there is a source (not negative), but at least 0; else the id. All int64."""
    out = torch.empty_like(ids)
    _next_ids[(triton.cdiv(len(ids), 128),)](ids, sources, sampled, out, len(ids), BLOCK=128, num_warps=1)
    return out


@triton.jit
def _best(
    logits, best, places, arrived, tokens, sampled, pairs, stride, size, parts, first,
    PAIRS: tl.constexpr, NOT_FINITE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid (rows, parts). The last program of a row to get there takes the best of all parts, for `pairs` or for the
    other two."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    none = 2147483647
    cols = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + cols, cols < size, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # what is no number is not finite either
    top = tl.max(x, 0)
    tl.store(best + row * parts + part, top)
    tl.store(places + row * parts + part, tl.min(tl.where(x == top, cols, none), 0))
    tl.debug_barrier()  # all that this program has stored, then its mark
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == parts - 1:
        tl.store(arrived + row, 0)
        at = tl.arange(0, PARTS)
        # not from this processor's own cache, which may hold what was there before
        tops = tl.load(best + row * parts + at, at < parts, other=float("-inf"), cache_modifier=".cg")
        where = tl.load(places + row * parts + at, at < parts, other=none, cache_modifier=".cg")
        top = tl.max(tops, 0)
        token = tl.min(tl.where(tops == top, where, none), 0).to(tl.int64)
        if PAIRS:
            tl.store(pairs + 2 * row, top)
            tl.store(pairs + 2 * row + 1, (first + token).to(tl.float32))
        else:
            token = tl.where(tl.abs(top) < float("inf"), token, NOT_FINITE)
            tl.store(tokens + row, token)
            tl.store(sampled + row, tl.maximum(token, 0))


@triton.jit
def _best_of(pairs, tokens, sampled, N: tl.constexpr, NOT_FINITE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    tops = tl.load(pairs + 2 * (row * N + at), at < N, other=float("-inf"))
    where = tl.load(pairs + 2 * (row * N + at) + 1, at < N, other=float("inf"))
    top = tl.max(tops, 0)
    token = tl.min(tl.where(tops == top, where, float("inf")), 0).to(tl.int64)
    token = tl.where(tl.abs(top) < float("inf"), token, NOT_FINITE)
    tl.store(tokens + row, token)
    tl.store(sampled + row, tl.maximum(token, 0))


def best_of(pairs: torch.Tensor, not_finite: int, tokens: torch.Tensor, sampled: torch.Tensor) -> None:
    """pairs float32 [R, N, 2], contiguous: of N parts of a row's logits, in order, the largest and its token. The token
    of the largest of all (the lower one where equal) goes to tokens and sampled as `Best.tokens` has it."""
    rows, parts, _ = pairs.shape
    _best_of[(rows,)](
        pairs, tokens, sampled, N=parts, NOT_FINITE=not_finite, BLOCK=triton.next_power_of_2(parts), num_warps=1
    )


class Best:
    """Owns the memory that programs meet in, for `max_rows` rows. One stream at a time uses an object."""

    def __init__(self, max_rows: int, vocabulary: int, device: torch.device) -> None:
        self._parts = triton.cdiv(vocabulary, _BLOCK)
        self._best = torch.empty(max_rows, self._parts, dtype=torch.float32, device=device)
        self._places = torch.empty(max_rows, self._parts, dtype=torch.int32, device=device)
        self._arrived = torch.zeros(max_rows, dtype=torch.int32, device=device)  # 0 between launches

    def tokens(self, logits: torch.Tensor, not_finite: int, tokens: torch.Tensor, sampled: torch.Tensor) -> None:
        """logits [R, V] -> tokens int64 [R]: the token of the largest (the lower one where equal), `not_finite` if that
        is infinite or no number; sampled int64 [R]: the same, but at least 0."""
        self._launch(logits, tokens, sampled, self._best, 0, False, not_finite)

    def pairs(self, logits: torch.Tensor, first: int, pairs: torch.Tensor) -> None:
        """logits [R, V] -> pairs float32 [R, 2], contiguous: the largest, inf if one is no number, and `first` plus its
        token."""
        self._launch(logits, self._places, self._places, pairs, first, True, 0)

    def _launch(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        sampled: torch.Tensor,
        pairs: torch.Tensor,
        first: int,
        as_pairs: bool,
        not_finite: int,
    ) -> None:
        rows, size = logits.shape
        _best[(rows, self._parts)](
            logits, self._best, self._places, self._arrived, tokens, sampled, pairs, logits.stride(0), size,
            self._parts, first, PAIRS=as_pairs, NOT_FINITE=not_finite, BLOCK=_BLOCK,
            PARTS=triton.next_power_of_2(self._parts), num_warps=8,
        )  # fmt: skip
