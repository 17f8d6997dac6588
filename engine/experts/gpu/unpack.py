"""The native packed layout (native/src/packing/format.hpp) read by torch, on any device.

A panel is 16 output rows: scales, then the quants in vectors of 64 bytes; the kernels' own table says what lies where.
GGUF's formulas: value = d u - d bias, d u + m, or d step u - dmin minimum_step.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import torch

PANEL, BLOCK = 16, 32
_HALVES = 2 * PANEL  # bytes of a row of float16 scales


@functools.cache
def _formats() -> Mapping[str, Any]:
    table: Mapping[str, Any] = importlib.import_module("native._native").packed_formats()
    return table


def panel_bytes(form: str, k: int) -> int:
    return int(_formats()[form].panel_size(k))


def unpack(packed: torch.Tensor, form: str, k: int, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [P * panel_bytes], contiguous -> [16 P, k] in `dtype`."""
    panels = packed.numel() // panel_bytes(form, k)
    if form in ("bf16", "f32"):
        group = 2 if form == "bf16" else 1
        values = packed.view(torch.bfloat16 if form == "bf16" else torch.float32)
        return values.view(panels, k // group, PANEL, group).permute(0, 2, 1, 3).reshape(PANEL * panels, k).to(dtype)
    rows, f = packed.view(panels, -1), _formats()[form]
    levels = _levels(rows[:, f.scales_size(k) :], f, panels, k)  # [P, blocks, 32, 16]
    scale, offset = _scales(rows, f, panels, k)  # broadcast over [P, blocks, 32, 16]
    values = levels.float() * scale + offset
    return values.reshape(panels, k, PANEL).transpose(1, 2).reshape(PANEL * panels, k).to(dtype)


def _levels(quants: torch.Tensor, f: Any, panels: int, k: int) -> torch.Tensor:
    blocks = k // BLOCK
    if f.quant_bytes == BLOCK * PANEL:  # a byte each; per 4 of k: 16 rows x 4
        return quants.view(panels, blocks, 8, PANEL, 4).transpose(3, 4).reshape(panels, blocks, BLOCK, PANEL)
    block = quants.view(panels, blocks, f.quant_bytes)
    nibbles = block[..., :256].view(panels, blocks, 4, PANEL, 4)
    low = torch.cat([nibbles & 15, nibbles >> 4], 2)  # [P, blocks, 8, 16, 4]: vectors j of k = 4 j .. 4 j + 3
    if bits := f.upper_bits:  # a vector of upper bits holds those of 8 / bits vectors
        upper = block[..., 256:].view(panels, blocks, bits, 1, PANEL, 4)
        shifts = torch.arange(0, 8, bits, device=quants.device, dtype=torch.uint8).view(1, 1, 1, 8 // bits, 1, 1)
        low = low + (((upper >> shifts) & (1 << bits) - 1) << 4).reshape(low.shape)
    return low.transpose(3, 4).reshape(panels, blocks, BLOCK, PANEL)


def _scales(rows: torch.Tensor, f: Any, panels: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, offset) of each value; both change every `group` of k."""
    units, groups = k // f.unit, f.unit // f.group
    meta = rows[:, : units * f.scale_bytes].reshape(panels, units, f.scale_bytes)

    def halves(at: int) -> torch.Tensor:
        part = meta[..., at : at + _HALVES].contiguous().view(torch.float16)
        return part.float()[:, :, None]  # [P, units, 1, 16]

    def steps(at: int, signed: bool) -> torch.Tensor:
        part = meta[..., at : at + groups * PANEL].contiguous()
        part = part.view(torch.int8) if signed else part
        return part.reshape(panels, units, groups, PANEL).float()

    def spread(values: torch.Tensor) -> torch.Tensor:
        """[P, units, groups, 16] over the k of each block: [P, blocks, 32 or 1, 16]."""
        values = values.reshape(panels, k // BLOCK, BLOCK // f.group, PANEL)
        return values if f.group == BLOCK else values.repeat_interleave(f.group, 2)

    scale = halves(0)
    if f.step_offset:
        scale = scale * steps(f.step_offset, signed=not f.minimum_offset)
    if not f.minimum_offset:
        return spread(scale), spread(-f.bias * scale)
    least = halves(f.minimum_offset)
    if f.minimum_step_offset:
        least = -least * steps(f.minimum_step_offset, signed=False)
    return spread(scale), spread(least)
