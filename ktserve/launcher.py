"""The one way in which this project starts Python: `__main__.py` by its path, in this interpreter.

`-m`, `-c` and what multiprocessing starts would import from the working directory first, before Python 3.11 without a
way to forbid it.
"""

from __future__ import annotations

import sys
from pathlib import Path


def program(*arguments: str) -> list[str]:
    """The command that runs one of our programs with its arguments (`ktserve/__main__.py` lists them)."""
    return [sys.executable, str(Path(__file__).with_name("__main__.py")), *arguments]
