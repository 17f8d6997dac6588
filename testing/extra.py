"""What an optional set of pyproject.toml needs, for pip: python -m testing.extra NAME

Installing "ktserve[NAME]" would install the project itself again, without its kernels."""

from __future__ import annotations

import re
import sys
from importlib.metadata import requires


def requirements(extra: str) -> list[str]:
    """Of the installed project. Raises LookupError for a set that there is not."""
    marked = [line.split(";") for line in requires("ktserve") or ()]
    found = [parts[0].replace(" ", "") for parts in marked if re.search(rf"extra == ['\"]{extra}['\"]", parts[-1])]
    if not found:
        raise LookupError(f"pyproject.toml has no optional dependencies {extra!r}")
    return found


if __name__ == "__main__":
    print(*requirements(sys.argv[1]))
