"""What an optional set of pyproject.toml needs, for pip: python -m testing.extra NAME

Installing "ktserve[NAME]" would install the project itself again, without its kernels."""

from __future__ import annotations

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement


def requirements(extra: str) -> list[str]:
    """Of the installed project, with this Python. Raises LookupError for a set that there is not."""
    known = [Requirement(line) for line in requires("ktserve") or ()]
    optional = [each for each in known if each.marker is not None and not each.marker.evaluate({"extra": ""})]
    found = [each for each in optional if each.marker is not None and each.marker.evaluate({"extra": extra})]
    if not found:
        raise LookupError(f"pyproject.toml has no optional dependencies {extra!r}")
    return [f"{each.name}{_bracketed(each.extras)}{each.specifier}" for each in found]


def _bracketed(extras: set[str]) -> str:
    return f"[{','.join(sorted(extras))}]" if extras else ""


if __name__ == "__main__":
    print(*requirements(sys.argv[1]))
