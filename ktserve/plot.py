"""Plots as plain SVG: lines and points, axes straight or logarithmic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 16, 40, 56
_COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8f6bb3", "#c77d1e", "#4b5563", "#0f9aa8", "#a83279")


@dataclass(frozen=True)
class Line:
    """Points (x, y) in order of x. `marks`: circles at the points; None: where they are few. `name` "": in no legend.
    `labels`: texts beside the first points."""

    name: str
    points: Sequence[tuple[float, float]]
    joined: bool = True
    marks: Literal["filled", "hollow", "none"] | None = None
    labels: Sequence[str] = ()
    colour: str | None = None


def plot(lines: Sequence[Line], *, title: str, x: str, y: str, log_x: bool = False, log_y: bool = False) -> str:
    """An SVG element, y from 0 but on a logarithmic axis, where nothing may be at 0 or below: ValueError. Points that
    are not finite are left out."""
    lines = [replace(line, points=[p for p in line.points if all(map(math.isfinite, p))]) for line in lines]
    xs = [point[0] for line in lines for point in line.points] or [1.0]
    ys = [point[1] for line in lines for point in line.points] or [1.0]
    low, high = (min(ys) / 1.5, max(ys) * 1.5) if log_y else (0.0, max(ys) * 1.05 or 1.0)
    at_x = _scale(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT, log_x)
    at_y = _scale(low, high, _HEIGHT - _BOTTOM, _TOP, log_y)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_WIDTH / 2, 20, title, "middle", ' font-size="14"'),
        _text((_LEFT + _WIDTH) / 2, _HEIGHT - 8, x, "middle"),
        _text(14, _HEIGHT / 2, y, "middle", f' transform="rotate(-90 14 {_HEIGHT / 2})"'),
    ]
    for value in (_powers if log_y else _ticks)(low, high):
        parts.append(_rule(_LEFT, at_y(value), _WIDTH - _RIGHT, at_y(value), "#e5e7eb"))
        parts.append(_text(_LEFT - 6, at_y(value) + 4, _short(value), "end"))
    for value in sorted(set(xs)) if log_x and len(set(xs)) <= 8 else (_powers if log_x else _ticks)(min(xs), max(xs)):
        parts.append(_rule(at_x(value), _HEIGHT - _BOTTOM, at_x(value), _HEIGHT - _BOTTOM + 4, "#9ca3af"))
        parts.append(_text(at_x(value), _HEIGHT - _BOTTOM + 18, _short(value), "middle"))
    for i, line in enumerate(lines):
        colour = line.colour or _COLOURS[i % len(_COLOURS)]
        places = [(at_x(px), at_y(py)) for px, py in line.points]
        if line.joined:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        marks = line.marks or ("filled" if len(places) <= 40 else "none")
        if marks != "none":
            fill = colour if marks == "filled" else "none"
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{fill}" stroke="{colour}"/>' for a, b in places]
        for (a, b), label in zip(places, line.labels, strict=False):
            parts.append(_text(a + 6, b + 12, label, "start"))
    for i, line in enumerate(line for line in lines if line.name):
        colour = line.colour or _COLOURS[lines.index(line) % len(_COLOURS)]
        parts.append(_rule(_LEFT + 8, _TOP + 10 + 16 * i, _LEFT + 28, _TOP + 10 + 16 * i, colour))
        parts.append(_text(_LEFT + 34, _TOP + 14 + 16 * i, line.name, "start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _scale(low: float, high: float, start: float, end: float, log: bool) -> Callable[[float], float]:
    if log and low <= 0:
        raise ValueError(f"a logarithmic axis begins above 0, not at {low}")
    shape: Callable[[float], float] = math.log10 if log else float
    first, span = shape(low), shape(high) - shape(low) or 1.0
    return lambda value: start + (shape(value) - first) / span * (end - start)


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers."""
    span = high - low
    if span <= 0:
        return [low]
    step: float = 10 ** math.floor(math.log10(span / 5))
    step = next(step * m for m in (1, 2, 5, 10) if span / (step * m) <= 6)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _powers(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [digit * 10.0**exponent for exponent in exponents for digit in (1, 2, 5)]
    return [value for value in found if low <= value <= high]


def _short(value: float) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:.6g}"


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#111827"{more}>{escape(text)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'
