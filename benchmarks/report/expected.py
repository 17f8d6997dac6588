"""Expected rates beside measured ones, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.planning.expected import rate_text, span_text


def table(found: Sequence[dict[str, Any]]) -> str:
    """Of rows of `benchmarks/cpu/expected.py`."""
    lines = ["| type | tokens a second of | expected | measured | off |", "|---|---|---|---|---|"]
    for row in found:
        span = row["expected_tokens_s"]
        said = "-" if row["off"] is None else f"{100 * row['off']:+.0f}%"
        expected = span_text(None if span is None else (span[0], span[1]))
        lines.append(f"| {row['type']} | {row['what']} | {expected} | {rate_text(row['tokens_s'])} | {said} |")
    return "\n".join(lines)
