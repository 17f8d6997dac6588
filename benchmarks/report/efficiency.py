"""engine/planning/efficiency.json: what share of a machine's read rate and peak each format reaches, from the results.

    python -m benchmarks.report.pages

makes it with the pages. `ktserve plan` expects rates from it. Per instruction set and type the lowest and the highest
share that was recorded: `decode` of the read rate, for one sequence; `prefill` of the peak operations, for a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS

OUT = Path(__file__).parents[2] / "engine" / "planning" / "efficiency.json"
_LONG = {"prefill 512", "prefill 2048"}
_TYPES = {"Q4_K_M": "Q4_K"}  # a file's name for the type of most of its tensors

Share = tuple[str, str, str, float, str]  # instruction set, type, "decode" or "prefill", share, file


def shares() -> Iterator[Share]:
    """Every share that the results hold."""
    for name, data in _read("cpu*.json"):
        isa = _isa(data["machine"]["isa"])
        for row in data["rows"]:
            kind = _TYPES.get(row["type"], row["type"])
            if row["row"] == "decode" and "of_read" in row:
                yield isa, kind, "decode", row["of_read"], name
            elif row["row"] == "prefill" and row["what"] in _LONG and "of_peak" in row:
                yield isa, kind, "prefill", row["of_peak"], name
    for name, data in _read("formats-*.json"):
        for row in data["rows"]:
            yield data["isa"], row["type"], "decode", row["of_read"], name


def table() -> dict[str, Any]:
    """The shares, and the files that they are from."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    sources: set[str] = set()
    for isa, kind, what, share, name in shares():
        low, high = found.setdefault(isa, {}).setdefault(kind, {}).get(what, (share, share))
        found[isa][kind][what] = [round(min(low, share, 1.0), 3), round(min(max(high, share), 1.0), 3)]
        sources.add(f"benchmarks/results/{name}")
    return {"made_by": "python -m benchmarks.report.pages", "sources": sorted(sources), "shares": found}


def content() -> str:
    """What the file is to hold."""
    return json.dumps(table(), indent=1, sort_keys=True) + "\n"


def _read(names: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The files of results of these names, by name."""
    for path in sorted(RESULTS.glob(names)):
        yield path.name, json.loads(path.read_text())


def _isa(flags: list[str]) -> str:
    if "amx_int8" in flags:
        return "amx"
    return "avx512" if "avx512_vnni" in flags else "avx2"
