"""Expected rates beside measured ones, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.planning.expected import rate_text, span_text


def table(found: Sequence[dict[str, Any]]) -> str:
    """Of rows of `benchmarks/cpu/expected.py`."""
    lines = [
        "| type | tokens a second of | experts of a layer | expected by `plan` | with these experts | measured | off |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        said = "-" if row["off"] is None else f"{100 * row['off']:+.0f}%"
        spans = (row[key] for key in ("expected_tokens_s", "with_experts_tokens_s"))
        cells = [
            row["type"],
            row["what"],
            "-" if row["experts"] is None else rate_text(row["experts"]),
            *(span_text(None if span is None else (span[0], span[1])) for span in spans),
            rate_text(row["tokens_s"]),
            said,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
