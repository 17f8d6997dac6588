"""The roofline plot: operations per byte across, operations per second up, both logarithmic."""

from __future__ import annotations

import math
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 760, 460, 70, 50, 30, 20
_COLOURS = {"Q8_0": "#1f6fb4", "Q4_K_M": "#c8501e", "BF16": "#3a8a3a"}


def points(data: dict[str, Any]) -> list[tuple[str, str, float, float]]:
    """(type, label, operations per byte, operations per second) of the rows that say both; the peer's too."""
    out = []
    for entry in data["rows"]:
        if "step_mb" not in entry or "operations" not in entry:
            continue
        intensity = entry["operations"] / (entry["step_mb"] * 1e6)
        rows = 1 if entry["row"] == "decode" else int(entry["what"].split()[1])
        out.append((entry["type"], str(rows), intensity, entry["operations"] * entry["ours"] / rows))
        if entry["peer"]:
            out.append((entry["type"], "", intensity, entry["operations"] * entry["peer"] / rows))
    return out


def plot(data: dict[str, Any]) -> str:
    """An SVG. Filled: ours, with the number of sequences; hollow: llama.cpp. Empty without decode rows."""
    seen, measured = points(data), list(data["peaks"].values())
    if not seen or not measured:
        return ""
    read = max(r["bytes_per_s"] for r in measured)
    peaks = {name: max(r[f"{name}_per_s"] for r in measured) for name in ("f32", "bf16", "int8")}
    peaks = {name: value for name, value in peaks.items() if value}
    x_low, x_high = 0.5, max(200.0, 2 * max(peaks.values()) / read)
    y_high = 1.6 * max(peaks.values())
    y_low = min(min(p[3] for p in seen), read * x_low) / 2

    def x(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log(value / x_low) / math.log(x_high / x_low)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * math.log(value / y_low) / math.log(y_high / y_low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for power in range(-1, 6):
        for value in (10.0**power, 2 * 10.0**power, 5 * 10.0**power):
            if x_low <= value <= x_high:
                parts.append(_line(x(value), y(y_low), x(value), y(y_high), "#e4e4e4"))
                parts.append(_text(x(value), _HEIGHT - _BOTTOM + 16, f"{value:g}", "middle"))
            if y_low <= value * 1e9 <= y_high:
                parts.append(_line(x(x_low), y(value * 1e9), x(x_high), y(value * 1e9), "#e4e4e4"))
                parts.append(_text(_LEFT - 6, y(value * 1e9) + 4, f"{value:g}", "end"))
    for name, peak in peaks.items():
        parts.append(_line(x(max(x_low, peak / read)), y(peak), x(x_high), y(peak), "#444"))
        parts.append(_text(x(x_high) - 4, y(peak) - 5, f"{name} {peak / 1e9:.0f} Gop/s", "end"))
    top = min(max(peaks.values()) / read, x_high)
    parts.append(_line(x(x_low), y(read * x_low), x(top), y(read * top), "#444"))
    parts.append(_text(x(x_low) + 8, y(read * x_low * 1.5) - 22, f"read {read / 1e9:.1f} GB/s", "start"))
    for kind, label, intensity, rate in seen:
        colour = _COLOURS.get(kind, "#555")
        fill = colour if label else "none"
        parts.append(f'<circle cx="{x(intensity):.1f}" cy="{y(rate):.1f}" r="4" fill="{fill}" stroke="{colour}"/>')
        if label:
            parts.append(_text(x(intensity) + 7, y(rate) + 12, label, "start", colour))
    for i, kind in enumerate(dict.fromkeys(p[0] for p in seen)):
        parts.append(_text(_LEFT + 10, _TOP + 14 + 16 * i, kind, "start", _COLOURS.get(kind, "#555")))
    parts.append(_text(_WIDTH / 2, _HEIGHT - 10, "operations per byte of weights and KV", "middle"))
    parts.append(_text(_LEFT, 18, "G operations/s; filled: ktserve, by sequences; hollow: llama.cpp", "start"))
    return "\n".join([*parts, "</svg>\n"])


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{text}</text>'
