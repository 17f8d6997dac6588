"""What `ktserve bench --quick` measured, as a finding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.diagnostics.doctor.finding import Figure, Finding
from engine.errors import UserError
from engine.planning.expected import rate_text, span_text

_SLOW = 0.85  # of the lowest rate that is expected
_REMEDY = "less than such machines reached: see the lines with -> above, and whether anything else runs here (top)"


def rates_finding(file: str) -> Finding:
    """Of a file of `ktserve bench --quick --json`, or of {"error": why there is none}. UserError for another one."""
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
        if "error" in found:
            return Finding("rates", f"not measured: {found['error']}")
        points = [_point(point) for point in found["quick"]]
    except OSError as error:
        raise UserError(f"--bench {file}: {error.strerror}", "bench") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"--bench {file}: no file of ktserve bench --quick --json FILE", "bench") from None
    figures = {name: number for _, numbers, _ in points for name, number in numbers.items()}
    remedy = _REMEDY if any(slow for _, _, slow in points) else ""
    return Finding("rates", "tokens a second: " + ", ".join(text for text, _, _ in points), remedy, figures)


def _point(point: dict[str, Any]) -> tuple[str, dict[str, Figure], bool]:
    """Of a line of the benchmark: text, figures, whether less was measured than is expected."""
    measured, key, what = float(point["tokens_s"]), str(point["key"]), str(point["what"])
    figures: dict[str, Figure] = {f"{key}_tokens_s": measured}
    if point["expected_tokens_s"] is None:
        return f"{what} {rate_text(measured)}", figures, False
    low, high = map(float, point["expected_tokens_s"])
    figures |= {f"{key}_expected_low": low, f"{key}_expected_high": high}
    return f"{what} {rate_text(measured)} (expected: {span_text((low, high))})", figures, measured < _SLOW * low
