"""From how many rows streaming a layer's experts to the GPU beats computing them on the CPU."""

from __future__ import annotations

import itertools


def threshold(cpu_s: dict[int, float], streamed_s: float) -> int | None:
    """The least rows at which the CPU takes longer than `streamed_s` a layer, between measured points by a straight
    line; beyond the last one by the line through the last two. None if the CPU would never be slower.

    `cpu_s`: seconds a layer by rows. Streaming hardly depends on rows: it moves every expert once.
    """
    points = sorted(cpu_s.items())
    if not points:
        return None
    if points[0][1] >= streamed_s:
        return points[0][0]
    pairs = list(itertools.pairwise(points))
    for (rows, seconds), (next_rows, next_seconds) in pairs:
        if next_seconds >= streamed_s:
            return _crossing(rows, seconds, next_rows, next_seconds, streamed_s)
    if not pairs:
        return None
    (rows, seconds), (next_rows, next_seconds) = pairs[-1]
    if next_seconds <= seconds:
        return None
    return _crossing(rows, seconds, next_rows, next_seconds, streamed_s)


def _crossing(rows: int, seconds: float, next_rows: int, next_seconds: float, at: float) -> int:
    return rows + -int(-(next_rows - rows) * (at - seconds) // (next_seconds - seconds))
