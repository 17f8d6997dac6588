"""Latencies as figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def p95(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
