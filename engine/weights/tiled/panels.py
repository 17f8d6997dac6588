"""The native packed layout (native/src/packing/format.hpp) read by torch, on any device.

A panel is 16 output rows: scales, then the quants in vectors of 64 bytes; the kernels' own table says what lies where.
GGUF's formulas: value = d u - d bias, d u + m, d step u - dmin minimum_step, or d step code[u]; of safetensors' own
types d u - d zero, and d e4m3; of grids d (2 s + 1) step times an entry and its signs.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import torch

PANEL, BLOCK = 16, 32
_HALVES = 2 * PANEL  # bytes of a row of float16 scales
_PLAIN = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@functools.cache
def _formats() -> Mapping[str, Any]:
    table: Mapping[str, Any] = importlib.import_module("native._native").packed_formats()
    return table


def panel_bytes(form: str, k: int) -> int:
    return int(_formats()[form].panel_size(k))


def unpack(packed: torch.Tensor, form: str, k: int, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [P * panel_bytes], contiguous -> [16 P, k] in `dtype`."""
    panels = packed.numel() // panel_bytes(form, k)
    if form in _PLAIN:
        group = 2 if form == "bf16" else 1
        values = packed.view(_PLAIN[form])
        return values.view(panels, k // group, PANEL, group).permute(0, 2, 1, 3).reshape(PANEL * panels, k).to(dtype)
    rows, f = packed.view(panels, -1), _formats()[form]
    if form == "f8":
        return _f8(rows, f, panels, k).to(dtype)
    if f.grid_values:
        return _grid(rows, f, panels, k).to(dtype)
    quants = levels(rows[:, f.scales_size(k) :], f, panels, k)
    scale, offset = _scales(rows, f, panels, k)  # broadcast over [P, blocks, 32, 16]
    if f.codes:
        values = torch.tensor(f.codes, dtype=torch.float32, device=packed.device)[quants.int()] * scale
    else:
        values = quants.float() * scale + offset
    return values.reshape(panels, k, PANEL).transpose(1, 2).reshape(PANEL * panels, k).to(dtype)


def _f8(rows: torch.Tensor, f: Any, panels: int, k: int) -> torch.Tensor:
    scale = rows[:, : k // f.unit * f.scale_bytes].contiguous().view(torch.float32).view(panels, k // f.unit, 1, PANEL)
    values = rows[:, f.scales_size(k) :].contiguous().view(torch.float8_e4m3fn).float()
    return (values.view(panels, k // f.unit, f.unit, PANEL) * scale).view(panels, k, PANEL).mT.reshape(-1, k)


def _grid(rows: torch.Tensor, f: Any, panels: int, k: int) -> torch.Tensor:
    units, blocks, entries, upper = k // f.unit, k // BLOCK, BLOCK // f.grid_values, f.grid_index_bits - 8
    meta = rows[:, : units * f.scale_bytes].reshape(panels, units, f.scale_bytes)
    block = rows[:, f.scales_size(k) :].reshape(panels, blocks, f.quant_bytes)
    words = block[..., : 4 * PANEL].contiguous().view(torch.int32).long()[:, :, None]  # [P, blocks, 1, 16]

    def counted(count: int, step: int = 1) -> torch.Tensor:
        return torch.arange(0, count * step, step, device=rows.device)[:, None] if step else words.new_zeros(1, 1)

    def bytes_at(at: int, lines: int) -> torch.Tensor:
        return meta[..., at : at + lines * PANEL].long().reshape(panels, -1, 1, PANEL)

    index = block[..., 4 * PANEL :].view(panels, blocks, -1, PANEL, 4).mT.reshape(panels, blocks, entries, PANEL).long()
    high = bytes_at(f.grid_high_offset, 8) if f.grid_high_offset else words >> 28
    index = index | (high >> counted(entries, upper) & (1 << upper) - 1) << 8
    table = torch.tensor(f.grid, dtype=torch.float32, device=rows.device).view(-1, f.grid_values)
    values: torch.Tensor = table[index].mT.reshape(panels, blocks, BLOCK, PANEL)
    signs = words >> counted(4, 7 if f.grid_parity else 8) & (127 if f.grid_parity else 255)
    if f.grid_parity:
        odd = signs ^ signs >> 4
        odd = odd ^ odd >> 2
        signs = signs | ((odd ^ odd >> 1) & 1) << 7
    negative = (signs[:, :, :, None] >> counted(8) & 1).reshape(panels, blocks, BLOCK, PANEL)
    factor = words >> 28 & 15
    if f.step_offset:
        factor = bytes_at(f.step_offset, f.unit // f.group // 2) >> counted(2, 4) & 15
    d = meta[..., :_HALVES].contiguous().view(torch.float16).float()[:, :, None]
    scale = d * ((2 * factor + 1) * f.grid_step).view(panels, units, -1, PANEL)
    values = values.reshape(panels, units, -1, f.group, PANEL) * scale[:, :, :, None]
    values = values.reshape(panels, k, PANEL) * (1 - 2 * negative.reshape(panels, k, PANEL))
    return values.mT.reshape(PANEL * panels, k)


def levels(quants: torch.Tensor, f: Any, panels: int, k: int) -> torch.Tensor:
    """The quants of uint8 [P, bytes behind the scales] as uint8 [P, blocks, 32, 16]."""
    blocks = k // BLOCK
    if f.quant_bytes == BLOCK * PANEL:  # a byte each; per 4 of k: 16 rows x 4
        return quants.view(panels, blocks, 8, PANEL, 4).transpose(3, 4).reshape(panels, blocks, BLOCK, PANEL)
    block = quants.view(panels, blocks, f.quant_bytes)

    def plane(part: torch.Tensor, bits: int) -> torch.Tensor:
        """A vector holds the bits of 8 / bits vectors: [P, blocks, 8, 16, 4], vectors j of k = 4 j .. 4 j + 3."""
        shifts = torch.arange(0, 8, bits, device=quants.device, dtype=torch.uint8).view(1, 1, 1, 8 // bits, 1, 1)
        shared = part.reshape(panels, blocks, bits, 1, PANEL, 4)
        return (shared >> shifts & (1 << bits) - 1).reshape(panels, blocks, 8, PANEL, 4)

    low_bytes = 4 * PANEL * f.low_bits
    if f.low_bits == 4:
        nibbles = block[..., :low_bytes].view(panels, blocks, 4, PANEL, 4)
        low = torch.cat([nibbles & 15, nibbles >> 4], 2)
    else:
        low = plane(block[..., :low_bytes], f.low_bits)
    if f.upper_bits:
        low = low + (plane(block[..., low_bytes:], f.upper_bits) << f.low_bits)
    return low.transpose(3, 4).reshape(panels, blocks, BLOCK, PANEL)


def _scales(rows: torch.Tensor, f: Any, panels: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, offset) of each value; both change every `group` of k."""
    units, groups = k // f.unit, f.unit // f.group
    meta = rows[:, : units * f.scale_bytes].reshape(panels, units, f.scale_bytes)

    def halves(at: int) -> torch.Tensor:
        part = meta[..., at : at + _HALVES].contiguous().view(torch.float16)
        return part.float()[:, :, None]  # [P, units, 1, 16]

    joined = f.step_offset != 0 and f.step_offset == f.minimum_step_offset  # in nibbles

    def steps(at: int, signed: bool, shift: int) -> torch.Tensor:
        part = meta[..., at : at + groups * PANEL].contiguous()
        part = part >> shift & 15 if joined else part.view(torch.int8) if signed else part
        return part.reshape(panels, units, groups, PANEL).float()

    def spread(values: torch.Tensor) -> torch.Tensor:
        """[P, units, groups, 16] over the k of each block: [P, blocks, 32 or 1, 16]."""
        values = values.reshape(panels, k // BLOCK, BLOCK // f.group, PANEL)
        return values if f.group == BLOCK else values.repeat_interleave(f.group, 2)

    scale = torch.exp2(meta.float() - 128)[:, :, None] if f.exponents else halves(0)
    if f.step_offset:
        scale = scale * steps(f.step_offset, not f.minimum_offset, 0)
    if not f.minimum_offset:
        least = -scale * meta[:, :, None, f.zero_offset : f.zero_offset + PANEL] if f.zero_offset else -f.bias * scale
        each = (-1, -1, groups, -1)
        return spread(scale.expand(each)), spread(least.expand(each))
    least = halves(f.minimum_offset)
    if f.minimum_step_offset:
        least = -least * steps(f.minimum_step_offset, False, 4)
    return spread(scale), spread(least)
