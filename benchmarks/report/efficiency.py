"""engine/planning/efficiency.json: what share of a machine's read rate and peak each format reaches, from the results.

    python -m benchmarks.report.efficiency

`ktserve plan` expects rates from it. Per instruction set and type the lowest and the highest share that was recorded:
`decode` of the read rate, for one sequence; `prefill` of the peak operations, for a prompt.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
OUT = ROOT / "engine" / "planning" / "efficiency.json"
_WHOLE = ("cpu-epyc-avx2", "cpu-xeon", "cpu-xeon-14", "cpu-xeon-avx512", "cpu-xeon-avx512-14", "cpu")
_FORMATS = ("formats-epyc-avx2", "formats-xeon-avx512")
_LONG = {"prefill 512", "prefill 2048"}
_TYPES = {"Q4_K_M": "Q4_K"}  # a file's name for the type of most of its tensors

Share = tuple[str, str, str, float, str]  # instruction set, type, "decode" or "prefill", share, file


def shares() -> Iterator[Share]:
    """Every share that the results hold."""
    for name in _WHOLE:
        data = _read(name)
        isa = _isa(data["machine"]["isa"])
        for row in data["rows"]:
            kind = _TYPES.get(row["type"], row["type"])
            if row["row"] == "decode" and "of_read" in row:
                yield isa, kind, "decode", row["of_read"], name
            elif row["row"] == "prefill" and row["what"] in _LONG and "of_peak" in row:
                yield isa, kind, "prefill", row["of_peak"], name
    for name in _FORMATS:
        data = _read(name)
        for row in data["rows"]:
            yield data["isa"], row["type"], "decode", row["of_read"], name


def table() -> dict[str, Any]:
    """The content of the file."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    sources: set[str] = set()
    for isa, kind, what, share, name in shares():
        low, high = found.setdefault(isa, {}).setdefault(kind, {}).get(what, (share, share))
        found[isa][kind][what] = [round(min(low, share, 1.0), 3), round(min(max(high, share), 1.0), 3)]
        sources.add(f"benchmarks/results/{name}.json")
    return {"made_by": "python -m benchmarks.report.efficiency", "sources": sorted(sources), "shares": found}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    OUT.write_text(json.dumps(table(), indent=1, sort_keys=True) + "\n")
    print(f"{OUT.relative_to(ROOT)} is written")


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return content


def _isa(flags: list[str]) -> str:
    if "amx_int8" in flags:
        return "amx"
    return "avx512" if "avx512_vnni" in flags else "avx2"


if __name__ == "__main__":
    main()
