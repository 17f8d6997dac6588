"""Lines of a program for who started it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console


def say(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
