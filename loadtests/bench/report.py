"""Tables, plots and comparisons of sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rich.table import Table

from loadtests.report.document import document, facts, plots
from loadtests.report.document import table as html_table
from loadtests.report.svg import Line, plot

_COLUMNS = {
    "requests": "requests", "failed": "failed", "requests_s": "req/s", "output_tokens_s": "out tok/s",
    "input_tokens_s": "in tok/s", "ttft_p50_ms": "TTFT p50", "ttft_p99_ms": "p99", "itl_p50_ms": "ITL p50",
    "itl_p99_ms": "p99", "goodput_s": "goodput/s", "expert_gb_s": "GB/s", "roof_share": "of the roof",
}  # fmt: skip
_UNITS = {key: " ms" for key in _COLUMNS if key.endswith("_ms")}
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
    """An HTML page: of each run where, when and what was asked, and a table; one line a run in each plot."""
    parts = []
    for name, run in runs.items():
        parts += [f"<h2>{escape(name)}</h2>", facts(_setting(run)), _html_table(run["points"])]
    for kind, axis in (("concurrency", "open requests"), ("rate", "requests a second")):
        points = {name: [p for p in run["points"] if p["kind"] == kind] for name, run in runs.items()}
        if not any(points.values()):
            continue
        svgs = []
        for key, unit in _PLOTS.items():
            lines = [
                Line(name, [(p["level"], p[key]) for p in some if p[key] is not None]) for name, some in points.items()
            ]
            svgs.append(plot(lines, title=unit, x=axis, y=unit, log_x=True))
        parts += [f"<h2>By {kind}</h2>", plots(svgs)]
    return document(" and ".join(runs), parts)


def _setting(run: Mapping[str, Any]) -> dict[str, str]:
    """Of files of older versions, what they have."""
    found = {name: str(run[key]) for name, key in (("server", "url"), ("began", "when")) if key in run}
    if "machine" in run:
        found["measured from"] = str(run["machine"])
    if "load_before" in run:
        found["load average before"] = f"{run['load_before']:.1f}"
    if "ttft_limit_ms" in run:
        limits = f"first token within {run['ttft_limit_ms']:g} ms, 99% of gaps within {run['itl_limit_ms']:g} ms"
        found["a good request (goodput)"] = limits
    work = run.get("work", {})
    return found | {name.replace("_", " "): _word(value) for name, value in work.items() if value not in (None, [], ())}


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _html_table(points: Sequence[Mapping[str, Any]]) -> str:
    present = [key for key in _COLUMNS if any(point.get(key) is not None for point in points)]
    rows = [[label(point), *(_cell(key, point.get(key)) for key in present)] for point in points]
    return html_table(["", *(f"{_COLUMNS[key]}{_UNITS.get(key, '')}" for key in present)], rows)
