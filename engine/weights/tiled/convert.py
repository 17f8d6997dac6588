"""Panels of the CPU's layout into the GPU's, by torch on any device.

Only bytes move: a scale's 16 rows go beside those of the next panel, quants are sorted into planes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.weights.tiled.layout import PANEL, Matrix
from engine.weights.tiled.panels import levels


def tiles_of(packed: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """uint8 [B, panels of a whole matrix], contiguous -> uint8 [B, matrix.num_bytes] on the same device."""
    out = torch.empty(packed.shape[0], matrix.num_bytes, dtype=torch.uint8, device=packed.device)
    put_tiles(out, packed, matrix, 0)
    return out


def put_tiles(out: torch.Tensor, packed: torch.Tensor, matrix: Matrix, first: int) -> None:
    """Rows from `first` on of each matrix of `out` [B, >= num_bytes] from uint8 [B, panels of some rows]. Both
    contiguous in their last dimension."""
    f, k = matrix.format, matrix.k
    count = packed.shape[0]
    panel = int(f.panel_size(k))
    some = packed.shape[1] // panel
    rows = packed.reshape(count * some, panel)
    last = first + some * PANEL

    def plane(name: str, width: int) -> torch.Tensor:
        at, size = matrix.planes[name]
        return out[:, at : at + size].view(count, -1, width)

    quants = rows[:, f.scales_size(k) :]
    values = quants if matrix.e4m3 else levels(quants, f, count * some, k)  # by k, then 16 rows
    values = values.reshape(count, some, k, PANEL).transpose(2, 3).reshape(count, some * PANEL, k)
    if matrix.padded_k > k:
        values = torch.nn.functional.pad(values, (0, matrix.padded_k - k))
    tiled = values.view(count, some * PANEL, -1, matrix.subs, matrix.sub)
    low = plane("low", matrix.padded_k * matrix.low // 8)[:, first:last]
    if matrix.low == 8:
        low.copy_(values if matrix.e4m3 else values ^ 128)
    else:
        half = matrix.subs // 2
        nibbles = tiled & 15
        low.copy_((nibbles[..., :half, :] | nibbles[..., half:, :] << 4).flatten(2))
    if matrix.upper:
        bits = tiled >> 4
        upper = bits[..., 0, :].clone()
        for at in range(1, matrix.subs):
            upper |= bits[..., at, :] << at * matrix.upper
        plane("upper", matrix.padded_k * matrix.upper // 8)[:, first:last].copy_(upper.flatten(2))

    units, groups = k // f.unit, f.unit // matrix.group
    meta = rows[:, : units * f.scale_bytes].reshape(count, some, units, f.scale_bytes)

    def scales(name: str, at: int, bytes_: int, each: int = 1, mask: int | None = None, shift: int = 0) -> None:
        """`each` rows of 16 x bytes_ from byte `at` of each unit."""
        part = meta[..., at : at + each * PANEL * bytes_].reshape(count, some, units * each, PANEL * bytes_)
        if mask is not None:
            part = part >> shift & mask
        target = plane(name, matrix.rows * bytes_)
        if units * each < target.shape[1]:
            target[:, units * each :, first * bytes_ : last * bytes_].zero_()
        target = target[:, : units * each, first * bytes_ : last * bytes_]
        target.copy_(part.transpose(1, 2).reshape(count, units * each, -1))

    scales("d", 0, matrix.d_bytes)
    if f.minimum_offset:
        scales("minima", f.minimum_offset, 2)
    if f.zero_offset:
        scales("minima", f.zero_offset, 1)
    if f.step_offset:
        scales("steps", f.step_offset, 1, groups)
    if f.minimum_step_offset:
        scales("minimum_steps", f.minimum_step_offset, 1, groups)


def joined_tiles(parts: Sequence[tuple[Matrix, torch.Tensor]]) -> tuple[Matrix, torch.Tensor]:
    """Matrices of one format and width, one below the other, as one; each uint8 [num_bytes]. All but the last have
    rows in multiples of 16."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0][0]
    whole = Matrix(first.form, sum(matrix.n for matrix, _ in parts), first.k)
    out = torch.zeros(whole.num_bytes, dtype=torch.uint8, device=parts[0][1].device)
    for name, (at, size) in whole.planes.items():
        if not size:
            continue
        views = []
        for matrix, tiles in parts:
            begin, length = matrix.planes[name]
            views.append(tiles[begin : begin + length].view(matrix.lines(name), -1))
        out[at : at + size] = torch.cat(views, 0 if name in ("low", "upper") else 1).flatten()
    return whole, out
