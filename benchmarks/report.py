"""The tables of docs/performance.md and the roofline plot beside it, from the results of benchmarks/bench_cpu.py.

python -m benchmarks.report [RESULTS.json]
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- results of bench_cpu: begin -->", "<!-- results of bench_cpu: end -->"
Entry = dict[str, Any]

# What is to be reached: by row and what is measured, the ratio to the peer and the share of a roof.
_RATIO = {
    "decode, 1 sequence": 1.4,
    "decode, 8 sequences": 2.0,
    "decode, 16 sequences": 2.4,
    "decode, 32 sequences": 3.0,
    "prefill 512": 2.0,
    "prefill 2048": 2.0,
    "server, 8 streams": 2.0,
    "server, 16 streams": 2.0,
}


def target(entry: Entry) -> tuple[str, bool | None]:
    """What an entry is to reach, and whether it does; None where that cannot be told (no peer)."""
    row, ratio = entry["row"], entry["ratio"]
    if row in ("decode", "batch", "prefill", "server") and entry["what"] in _RATIO:
        want = 1.7 if row == "prefill" and entry["type"] == "BF16" else _RATIO[entry["what"]]
        parts: list[tuple[str, bool | None]] = [(f"{want:g}x", None if ratio is None else ratio >= want)]
        if row == "decode":
            parts.append(("85% of read", entry["of_read"] >= 0.85))
        if row == "prefill":
            parts.append(("50% of peak", entry["of_peak"] >= 0.5))
        if row == "server":
            theirs = entry.get("peer_ttft_s")
            parts.append(("TTFT 1/3", None if theirs is None else entry["ttft_s"] <= theirs / 3))
        return " and ".join(text for text, _ in parts), _all([good for _, good in parts])
    if row == "adapters":
        want = 0.83 if entry["type"] == "Q4_K_M" else 0.9
        return f"{want:.0%} of base", entry["kept"] >= want
    if row == "idle":
        return "98%", entry["ours"] >= 98
    if row == "python":
        return ("under 3%", entry["ours"] < 3) if "8 rows" in entry["what"] else ("", None)
    if row == "arrivals":
        return "at most 3x", entry["ours"] <= 3
    return "", None


def _all(parts: Sequence[bool | None]) -> bool | None:
    if any(part is False for part in parts):
        return False
    return None if None in parts else True


def render(data: dict[str, Any]) -> str:
    """Markdown between the markers, these not included."""
    machine, versions = data["machine"], data["versions"]
    lines = [
        f"{machine['cpu']}; {machine['cores']} cores, {machine['threads']} threads, {machine['memory_gb']} GB; "
        f"{', '.join(machine['isa'])}. Commit {data['commit']}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f". {data['seconds'] / 60:.0f} minutes, load before it {machine['load_before']:.1f}.",
        "",
        f"    {data['command']}",
        "",
    ]
    for mix, roofs in data["roofs"].items():
        peaks = ", ".join(f"{name} {roofs[f'{name}_per_s'] / 1e9:.0f}" for name in ("f32", "bf16", "int8"))
        read = f"read {roofs['bytes_per_s'] / 1e9:.1f} GB/s"
        lines.append(f"- Roofs before {mix}: {read}; {peaks} G operations/s")
    for mix, sweep in data["peer_sweep"].items():
        lines.append(f"- llama.cpp's best flags for {mix}: `{sweep['best']}`, of {len(sweep['tried'])} tried")
    if "llama.cpp" not in versions:
        lines.append("- Measured without llama.cpp: its columns are empty")
    lines += [
        "",
        "| | type | ours | llama.cpp | ratio | seen with it | to reach | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(entry) for entry in data["rows"]]
    if points(data) and data["roofs"]:
        lines += ["", "![Operations per second against operations per byte](roofline.svg)"]
    for text in data.get("left_out", []):
        lines.append(f"\nNot measured: {text}")
    return "\n".join(lines)


def _row(entry: Entry) -> str:
    text, good = target(entry)
    unit, peer, ratio = entry["unit"], entry["peer"], entry["ratio"]
    cells = [
        entry["what"],
        entry["type"],
        f"{_number(entry['ours'])} {unit}",
        "" if peer is None else f"{_number(peer)} {unit}",
        "" if ratio is None else f"{ratio:.2f}x",
        "; ".join(_details(entry)),
        text,
        {True: "yes", False: "**no**", None: ""}[good],
    ]
    return f"| {' | '.join(cells)} |"


def _details(entry: Entry) -> list[str]:
    out = []
    if "gb_s" in entry:
        out.append(f"{entry['step_mb']:.0f} MB a step, {entry['gb_s']:.1f} GB/s, {entry['of_read']:.0%} of read")
    if "of_peak" in entry:
        out.append(f"{entry['gop_s']:.0f} Gop/s, {entry['of_peak']:.0%} of {entry['peak_of']}")
    if "kept" in entry:
        theirs = f" (llama.cpp {entry['peer_kept']:.0%})" if "peer_kept" in entry else ""
        out.append(f"{entry['kept']:.0%} of base only{theirs}")
    for key, name, unit in (("ttft_s", "median TTFT", " s"), ("itl_ms", "ITL", " ms"), ("max_gap_per_itl", "gap", "x")):
        if key in entry:
            theirs = f" ({_number(entry[f'peer_{key}'])})" if f"peer_{key}" in entry else ""
            out.append(f"{name} {_number(entry[key])}{unit}{theirs}")
    if "late_ttft_s" in entry:
        theirs = f" ({_number(entry['peer_late_ttft_s'])})" if "peer_late_ttft_s" in entry else ""
        out.append(f"TTFT of the arriving {_number(entry['late_ttft_s'])} s{theirs}")
    if "pairs" in entry:
        out.append(f"{entry['pairs']} pairs, quartiles {entry['quartile_low']:.1f} to {entry['quartile_high']:.1f}")
    if "outside_native_ms" in entry:
        out.append(f"{entry['outside_native_ms']:.2f} of {entry['step_ms']:.1f} ms")
    if (runs := len(entry["all_ours"])) > 1 and "pairs" not in entry:
        out.append(f"{runs} repetitions")
    return out


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


# ---- the plot: operations per byte across, operations per second up, both logarithmic

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
    seen, roofs = points(data), list(data["roofs"].values())
    if not seen or not roofs:
        return ""
    read = max(r["bytes_per_s"] for r in roofs)
    peaks = {name: max(r[f"{name}_per_s"] for r in roofs) for name in ("f32", "bf16", "int8")}
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


def insert(page: str, table: str) -> str:
    """The page with what stands between the markers replaced. ValueError if it lacks them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def main() -> None:
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "benchmarks" / "results" / "cpu.json"
    data, page = json.loads(results.read_text()), ROOT / "docs" / "performance.md"
    page.write_text(insert(page.read_text(), render(data)))
    if svg := plot(data):
        (ROOT / "docs" / "roofline.svg").write_text(svg)
    print(f"{page.relative_to(ROOT)} from {results.name}: {len(data['rows'])} rows")


if __name__ == "__main__":
    main()
