"""Tables of ours beside llama.cpp: every format and several families on a CPU, and experts placed with a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_WHERE = {
    "cpu": "on the CPU",
    "whole": "all on the GPU",
    "half": "half on the GPU",
    "layers": "of half the layers on the GPU",
}
_PLACES = list(_WHERE)
FORMATS_HEAD = (
    *("bits", "decode", "llama.cpp", "ratio", "of read"),
    *("prefill", "llama.cpp", "ratio", "error", "llama.cpp"),
)


def formats(data: dict[str, Any]) -> str:
    """Of benchmarks/cpu/formats.py. Errors are in thousandths of the result's size."""
    rows = []
    for row in data["rows"]:
        cells = [row["type"], f"{row['bits']:.2f}", *_beside(row["decode"], row["peer_decode"])]
        cells += [f"{row['of_read']:.0%}", *_beside(row["prefill"], row["peer_prefill"])]
        rows.append([*cells, *map(_error, (row["error"], row["peer_error"]))])
    return "\n\n".join([origin(data), table(["", *FORMATS_HEAD], rows)])


def families(data: dict[str, Any]) -> str:
    """Of benchmarks/cpu/families.py, tokens a second."""
    rows = []
    for row in data["rows"]:
        shares = ["" if row[key] is None else f"{row[key]:.0%}" for key in ("of_read", "outside")]
        what = [f"{row['shape']}, {row['layers']} layers", row["type"], row["what"]]
        rows.append([*what, *_beside(row["ours"], row["peer"]), *shares])
    return "\n\n".join(
        [origin(data), table(["", "type", "", "tok/s", "llama.cpp", "ratio", "of read", "outside"], rows)]
    )


def llamacpp(data: dict[str, Any]) -> str:
    """Of benchmarks/gpu/llamacpp.py, tokens a second."""
    rows = [
        [
            _WHERE[entry.get("placement", "cpu")],
            entry["type"],
            str(entry["rows"]),
            *_beside(entry["ours_tok_s"], entry["llamacpp_tok_s"]),
        ]
        for entry in sorted(
            data["results"], key=lambda each: (_PLACES.index(each.get("placement", "cpu")), each["rows"])
        )
    ]
    return "\n\n".join([origin(data), table(["experts", "type", "rows", "ours, tok/s", "llama.cpp", "ratio"], rows)])


def _error(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value * 1e3:.2f}" if value > 1e-4 else f"{value * 1e3:.1g}"


def _beside(ours: float, theirs: float | None) -> list[str]:
    return [f"{ours:,.0f}", *(["", ""] if theirs is None else [f"{theirs:,.0f}", f"{ours / theirs:.2f}x"])]


def origin(data: dict[str, Any]) -> str:
    """Where the figures come from, above a table."""
    dirty = " with changes" if data["dirty"] is True else ""
    return f"{data['hardware']}; commit {data['commit']}{dirty}, {data['date']}.\n\n    {data['command']}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
