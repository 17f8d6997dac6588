"""The native packed layout (native/src/core/format.hpp) read by torch, on any device.

A panel is 16 output rows: scales, then the quants in vectors of 64 bytes. GGUF's formulas:
i8 d (u - 128), i4 d (u - 8), i5 d (u - 16), i4m and i5m d u + m, k4 and k5 d scale u - dmin min, k6 d scale (u - 32).
"""

from __future__ import annotations

import torch

PANEL, BLOCK, SUPER = 16, 32, 256
_BIAS = {"i8": 128, "i4": 8, "i4m": 0, "i5": 16, "i5m": 0}
# Bytes of a panel: per block of 32 k or super-block, and per block.
_META = {"i8": 32, "i4": 32, "i4m": 64, "i5": 32, "i5m": 64, "k4": 320, "k5": 320, "k6": 288}
_QUANTS = {"i8": 512, "i4": 256, "i4m": 256, "i5": 320, "i5m": 320, "k4": 256, "k5": 320, "k6": 384}
_UPPER_BITS = {"i5": 1, "i5m": 1, "k5": 1, "k6": 2}  # above the low nibbles


def panel_bytes(form: str, k: int) -> int:
    if form in ("bf16", "f32"):
        return PANEL * k * (2 if form == "bf16" else 4)
    unit = SUPER if form.startswith("k") else BLOCK
    return -(-(k // unit * _META[form]) // 64) * 64 + k // BLOCK * _QUANTS[form]


def unpack(packed: torch.Tensor, form: str, k: int, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [P * panel_bytes], contiguous -> [16 P, k] in `dtype`."""
    panels = packed.numel() // panel_bytes(form, k)
    if form in ("bf16", "f32"):
        group = 2 if form == "bf16" else 1
        values = packed.view(torch.bfloat16 if form == "bf16" else torch.float32)
        return values.view(panels, k // group, PANEL, group).permute(0, 2, 1, 3).reshape(PANEL * panels, k).to(dtype)
    rows = packed.view(panels, -1)
    quants = rows[:, rows.shape[1] - k // BLOCK * _QUANTS[form] :]
    levels = _levels(quants, form, panels, k)  # [P, blocks, 32, 16]
    scale, offset = _scales(rows, form, panels, k)  # broadcast over [P, blocks, 32, 16]
    values = levels.float() * scale + offset
    return values.reshape(panels, k, PANEL).transpose(1, 2).reshape(PANEL * panels, k).to(dtype)


def _levels(quants: torch.Tensor, form: str, panels: int, k: int) -> torch.Tensor:
    blocks = k // BLOCK
    if form == "i8":  # per 4 of k: 16 rows x 4
        return quants.view(panels, blocks, 8, PANEL, 4).transpose(3, 4).reshape(panels, blocks, BLOCK, PANEL)
    block = quants.view(panels, blocks, _QUANTS[form])
    nibbles = block[..., :256].view(panels, blocks, 4, PANEL, 4)
    low = torch.cat([nibbles & 15, nibbles >> 4], 2)  # [P, blocks, 8, 16, 4]: vectors j of k = 4 j .. 4 j + 3
    if bits := _UPPER_BITS.get(form, 0):  # a vector of upper bits holds those of 8 / bits vectors
        upper = block[..., 256:].view(panels, blocks, bits, 1, PANEL, 4)
        shifts = torch.arange(0, 8, bits, device=quants.device, dtype=torch.uint8).view(1, 1, 1, 8 // bits, 1, 1)
        low = low + (((upper >> shifts) & (1 << bits) - 1) << 4).reshape(low.shape)
    return low.transpose(3, 4).reshape(panels, blocks, BLOCK, PANEL)


def _scales(rows: torch.Tensor, form: str, panels: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    if form in _BIAS:
        meta = rows[:, : k // BLOCK * _META[form]].reshape(panels, k // BLOCK, 1, -1)
        d = meta[..., :32].contiguous().view(torch.float16).float()
        offset = meta[..., 32:].contiguous().view(torch.float16).float() if form.endswith("m") else -_BIAS[form] * d
        return d, offset
    meta = rows[:, : k // SUPER * _META[form]].reshape(panels, k // SUPER, _META[form])
    d = meta[..., :32].contiguous().view(torch.float16).float()[:, :, None]
    if form == "k6":
        steps = meta[..., 32:].contiguous().view(torch.int8).view(panels, k // SUPER, 16, PANEL).float() * d
        scale = steps.reshape(panels, k // BLOCK, 2, PANEL).repeat_interleave(16, 2)
        return scale, -32 * scale
    dmin = meta[..., 32:64].contiguous().view(torch.float16).float()[:, :, None]
    scale = (meta[..., 64:192].reshape(panels, k // SUPER, 8, PANEL).float() * d).reshape(panels, k // BLOCK, 1, PANEL)
    least = meta[..., 192:].reshape(panels, k // SUPER, 8, PANEL).float() * dmin
    return scale, -least.reshape(panels, k // BLOCK, 1, PANEL)
