"""Tables, plots and comparisons of sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rich.table import Table

from loadtests.report.svg import Line, plot

_COLUMNS = {
    "requests": "requests", "failed": "failed", "requests_s": "req/s", "output_tokens_s": "out tok/s",
    "input_tokens_s": "in tok/s", "ttft_p50_ms": "TTFT p50", "ttft_p99_ms": "p99", "itl_p50_ms": "ITL p50",
    "itl_p99_ms": "p99", "goodput_s": "goodput/s", "expert_gb_s": "GB/s", "roof_share": "of the roof",
}  # fmt: skip
_COMPARED = ("output_tokens_s", "goodput_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
_PLOTS = {
    "output_tokens_s": "tok/s", "goodput_s": "good requests/s", "ttft_p50_ms": "TTFT p50, ms",
    "ttft_p99_ms": "TTFT p99, ms", "itl_p50_ms": "ITL p50, ms", "itl_p99_ms": "ITL p99, ms",
}  # fmt: skip


def label(point: Mapping[str, Any]) -> str:
    return f"{point['level']:g}/s" if point["kind"] == "rate" else f"{point['level']:g} open"


def table(points: Sequence[Mapping[str, Any]], title: str) -> Table:
    shown = Table(title=title)
    shown.add_column("")
    present = [key for key in _COLUMNS if any(point.get(key) is not None for point in points)]
    for key in present:
        shown.add_column(_COLUMNS[key], justify="right")
    for point in points:
        shown.add_row(label(point), *(_cell(key, point.get(key)) for key in present))
    return shown


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    return f"{100 * value:.1f}%" if key == "roof_share" else f"{value:g}" if value < 100 else f"{value:.0f}"


def compared(first: Mapping[str, Any], second: Mapping[str, Any]) -> Table:
    """The second's figures over the first's at the points that both have. ValueError if there are none."""
    mine = {(point["kind"], point["level"]): point for point in first["points"]}
    pairs = [(mine[at], point) for point in second["points"] if (at := (point["kind"], point["level"])) in mine]
    if not pairs:
        raise ValueError("the two files have no point in common")
    differ = sorted(k for k in first["work"] if first["work"][k] != second["work"].get(k) and k != "models")
    note = f"; their work differs in {', '.join(differ)}" if differ else ""
    shown = Table(title=f"second / first{note}")
    shown.add_column("")
    for key in _COMPARED:
        shown.add_column(key, justify="right")
    for one, other in pairs:
        shown.add_row(label(one), *(_ratio(one.get(key), other.get(key)) for key in _COMPARED))
    return shown


def _ratio(one: float | None, other: float | None) -> str:
    return f"{other / one:.2f}" if one and other is not None else ""


def page(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """An HTML page with one line a run in each plot."""
    parts = [f"<h1>{escape(' and '.join(runs))}</h1>"]
    for kind, axis in (("concurrency", "open requests"), ("rate", "requests a second")):
        points = {name: [p for p in run["points"] if p["kind"] == kind] for name, run in runs.items()}
        if not any(points.values()):
            continue
        parts.append(f"<h2>By {kind}</h2>")
        for key, unit in _PLOTS.items():
            lines = [
                Line(name, [(p["level"], p[key]) for p in some if p[key] is not None]) for name, some in points.items()
            ]
            parts.append(plot(lines, title=unit, x=axis, y=unit, log_x=True))
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>ktserve bench</title>'
    return (
        head + "<style>body{font:14px sans-serif;margin:2em}svg{margin:.5em}</style>" + "\n".join(parts) + "</html>\n"
    )
