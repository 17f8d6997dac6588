"""README's table: every kind of machine that was measured, the slowest first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.report.beside import table

_CPUS = {
    "cpu-epyc-avx2.json": "2 AMD cores, AVX2",
    "cpu.json": "2 AMD cores, AVX-512",
    "cpu-xeon.json": "2 Intel cores, AMX",
}
_GPUS = {
    "gpu-llamacpp.json": ("an H200, experts on 14 AMX cores", None),
    "gpu-llamacpp-q4_k_m.json": ("an H200, all on it (Q4_K_M)", "whole"),
}
_ROWS = {
    "decode, 1 sequence": ("one sequence, tok/s", 1),
    "decode, 8 sequences": ("8 sequences", 8),
    "decode, 32 sequences": ("32 sequences", 32),
    "prefill 512": ("a prompt of 512 tokens, tok/s", None),
    "prefill 2048": ("of 2048", None),
    "server, 8 streams": ("server, 8 streams, tok/s", None),
    "server, 8 streams on 4 adapters": ("8 streams on 4 adapters", None),
    "first start": ("first start, s", None),
    "second start": ("second start, s", None),
}


def summary(load: Callable[[str], dict[str, Any]]) -> str:
    """Ours, and in brackets how many times llama.cpp's; Q8_0 where nothing else is said."""
    columns: list[list[str]] = []
    for name in _CPUS:
        found = {entry["what"]: entry for entry in load(name)["rows"] if entry["type"] == "Q8_0"}
        columns.append([_cell(found[what]["ours"], found[what]["ratio"]) if what in found else "" for what in _ROWS])
    for name, (_, placement) in _GPUS.items():
        rows = {each["rows"]: each for each in load(name)["results"] if each.get("placement") == placement}
        counts = [count for _, count in _ROWS.values()]
        columns.append([_cell(rows[n]["ours_tok_s"], rows[n]["ratio"]) if n in rows else "" for n in counts])
    names = [*_CPUS.values(), *(name for name, _ in _GPUS.values())]
    labels = [label for label, _ in _ROWS.values()]
    return table(["", *names], [[label, *cells] for label, *cells in zip(labels, *columns, strict=True)])


def _cell(ours: float, ratio: float | None) -> str:
    number = f"{ours:,.0f}" if ours >= 100 else f"{ours:.1f}"
    return number if ratio is None else f"{number} ({ratio:.0f}x)" if ratio >= 10 else f"{number} ({ratio:.2f}x)"
