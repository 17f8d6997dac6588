"""Many adapters in one batch, by segments (Punica's SGMV, arXiv 2310.18547): tokens sorted by adapter, cut into tiles.

shrink:  part[s, p, i] = x[order[i]] A[slot, p]^T over the s-th share of the inner dimension
expand:  y[order[i]]  += scale[slot, p] * (sum_s part[s, p, i]) B[slot]^T      columns of projection p

Shares are summed in one order, so a row's result depends neither on its neighbours nor on timing.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

TILE = 16  # tokens
_BLOCK_K = 256
_BLOCK_N = 64
_MAX_SHARES, _FEW_TOKENS = 16, 256  # of more tokens half as many: what shares give is held in memory


@triton.jit
def _tile_of(tiles, tile, ranks, order, ROWS: tl.constexpr):
    """(adapter slot, its rank: 0 where there is nothing to do; first place in order, which rows are live, rows)."""
    slot, start, length = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    i = tl.arange(0, ROWS)
    live = (i < length) & (slot > 0)
    rank = tl.multiple_of(tl.load(ranks + slot, slot > 0, other=0), 16)  # so that loads along it are wide
    return slot, rank, start + i, live, tl.load(order + start + i, live, other=0).to(tl.int64)


@triton.jit
def _shrink(
    x, a, ranks, order, tiles, part, x_stride, inner, share, a_slot, tokens,
    PARTS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    p, s = tl.program_id(1), tl.program_id(2)
    slot, rank, place, live, row = _tile_of(tiles, tl.program_id(0), ranks, order, ROWS)
    if rank == 0:
        return
    r = tl.arange(0, RANK)
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros([ROWS, RANK], tl.float32)
    table = a + slot.to(tl.int64) * a_slot + (p * RANK + r[None, :]) * inner
    for at in range(s * share, tl.minimum((s + 1) * share, inner), BLOCK_K):
        inside = at + k < inner
        left = tl.load(x + row[:, None] * x_stride + at + k[None, :], live[:, None] & inside[None, :], other=0.0)
        right = tl.load(table + at + k[:, None], (r[None, :] < rank) & inside[:, None], other=0.0)
        total += tl.dot(left, right.to(left.dtype), input_precision=PRECISION)
    to = part + ((s * PARTS + p) * tokens + place[:, None]) * RANK + r[None, :]
    tl.store(to, total, live[:, None])


@triton.jit
def _expand(
    y, b, ranks, scales, order, tiles, part, y_stride, outer, first, second, tokens,
    PARTS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SHARES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK_N
    slot, rank, place, live, row = _tile_of(tiles, tl.program_id(0), ranks, order, ROWS)
    if rank == 0:
        return
    p = (column >= first).to(tl.int32) + (column >= second).to(tl.int32)
    r = tl.arange(0, RANK)
    inside = live[:, None] & (r[None, :] < rank)
    n = column + tl.arange(0, BLOCK_N)
    table = b + (slot.to(tl.int64) * outer + n[None, :]) * RANK + r[:, None]
    right = tl.load(table, (n[None, :] < outer) & (r[:, None] < rank), other=0.0).to(tl.float32)
    to = y + row[:, None] * y_stride + n[None, :]
    mask = live[:, None] & (n[None, :] < outer)
    value = tl.load(to, mask, other=0.0)
    scale = tl.load(scales + slot * PARTS + p)
    h = tl.zeros([ROWS, RANK], tl.float32)
    for s in tl.static_range(SHARES):  # no load waits for another
        h += tl.load(part + ((s * PARTS + p) * tokens + place[:, None]) * RANK + r[None, :], inside, other=0.0)
    delta = tl.dot(h, right, input_precision=PRECISION) * scale
    tl.store(to, (value.to(tl.float32) + delta).to(value.dtype), mask)


@dataclass(frozen=True)
class SegmentedLora:
    """LoRA of each row's slot for P <= 3 projections of x [T, in], side by side in y [T, out].

    a [slots, P R, in], b [slots, out, R], ranks int32 [slots] (0: nothing), scales float32 [slots, P]; R a power of two
    from 16. starts: the first column of each projection, multiples of 64 but the first. order int32 [T] and
    tiles int32 [n, 3] as in engine.linear.segments.
    """

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    scales: torch.Tensor
    starts: list[int]
    order: torch.Tensor
    tiles: torch.Tensor

    def shares(self, x: torch.Tensor) -> torch.Tensor:
        """Room for what `shrink` gives, float32."""
        size = self._shares, len(self.starts), len(self.order), self.b.shape[2]
        return torch.empty(size, dtype=torch.float32, device=x.device)

    def shrink(self, x: torch.Tensor, part: torch.Tensor) -> None:
        inner, exact = x.shape[1], x.dtype == torch.float32
        _shrink[(len(self.tiles), len(self.starts), self._shares)](
            x, self.a, self.ranks, self.order, self.tiles, part, x.stride(0), inner, self._share, self.a.stride(0),
            len(self.order), PARTS=len(self.starts), RANK=self.b.shape[2], ROWS=TILE,
            BLOCK_K=_BLOCK_K // 4 if exact else _BLOCK_K, PRECISION="ieee" if exact else "tf32", num_warps=4,
        )  # fmt: skip

    def expand(self, y: torch.Tensor, part: torch.Tensor) -> None:
        """y += what `shrink` gave times B."""
        outer = y.shape[1]
        bounds = [*self.starts[1:], outer, outer][:2]
        _expand[(len(self.tiles), triton.cdiv(outer, _BLOCK_N))](
            y, self.b, self.ranks, self.scales, self.order, self.tiles, part, y.stride(0), outer, *bounds,
            len(self.order), PARTS=len(self.starts), RANK=self.b.shape[2], ROWS=TILE, BLOCK_N=_BLOCK_N,
            SHARES=self._shares, PRECISION="ieee" if y.dtype == torch.float32 else "tf32", num_warps=4,
        )  # fmt: skip

    @property
    def _share(self) -> int:
        """Values of K."""
        most = _MAX_SHARES if len(self.order) <= _FEW_TOKENS else _MAX_SHARES // 2
        return int(triton.cdiv(triton.cdiv(self.a.shape[2], most), _BLOCK_K)) * _BLOCK_K

    @property
    def _shares(self) -> int:
        return int(triton.cdiv(self.a.shape[2], self._share))
