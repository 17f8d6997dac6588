"""The roofline plot: operations per byte across, operations per second up, both logarithmic."""

from __future__ import annotations

from typing import Any

from ktserve.plot import Line
from ktserve.plot import plot as line_plot

_LEAST_INTENSITY, _MOST_INTENSITY = 0.5, 200.0
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
    read = max(each["bytes_per_s"] for each in measured)
    peaks = {name: max(each[f"{name}_per_s"] for each in measured) for name in ("f32", "bf16", "int8")}
    peaks = {name: value for name, value in peaks.items() if value}
    highest, right = max(peaks.values()), max(_MOST_INTENSITY, 2 * max(peaks.values()) / read)
    lines = [
        _roof(f"read {read / 1e9:.1f} GB/s", [(_LEAST_INTENSITY, read * _LEAST_INTENSITY), (highest / read, highest)])
    ]
    for name, peak in peaks.items():
        lines.append(
            _roof(f"{name} {peak / 1e9:.0f} Gop/s", [(max(_LEAST_INTENSITY, peak / read), peak), (right, peak)])
        )
    for kind in dict.fromkeys(point[0] for point in seen):
        for ours in (True, False):
            shown = [point for point in seen if point[0] == kind and bool(point[1]) is ours]
            lines.append(
                Line(
                    kind if ours else "",
                    [(intensity, rate / 1e9) for _, _, intensity, rate in shown],
                    joined=False,
                    marks="filled" if ours else "hollow",
                    labels=[label for _, label, _, _ in shown],
                    colour=_COLOURS.get(kind, "#555"),
                )
            )
    title = "Filled: ktserve, by sequences; hollow: llama.cpp"
    return line_plot(
        lines, title=title, x="operations per byte of weights and KV", y="G operations/s", log_x=True, log_y=True
    )


def _roof(name: str, ends: list[tuple[float, float]]) -> Line:
    return Line(name, [(intensity, rate / 1e9) for intensity, rate in ends], marks="none", colour="#444")
