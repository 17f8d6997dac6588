"""A line of the report, and what it is read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from native.cgroup import read_text

Figure = int | float | str | bool | None


@dataclass(frozen=True)
class Finding:
    """`value` is for people, `figures` for programs (sizes in bytes, rates in bytes a second). `remedy`: what to do if
    this holds a server back; "" if there is nothing to do."""

    name: str
    value: str
    remedy: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)


@dataclass(frozen=True)
class Here:
    """The machine: `root` is where /proc and /sys are looked for, `cpus` are those that this process may use."""

    root: Path
    cpus: tuple[int, ...]

    def text(self, path: str) -> str:
        """A file below `root`, stripped; "" if it cannot be read."""
        return read_text(self.root / path).strip()

    def cpu_info(self) -> dict[str, str]:
        """The fields that /proc/cpuinfo has of the first CPU."""
        first = self.text("proc/cpuinfo").partition("\n\n")[0]
        pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
        return {name.strip(): value.strip() for name, value in pairs}


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 8] -> "0-2,8"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
