"""C++ kernels of the CPU: worker pool, packed weights, experts, linear, attention."""

from __future__ import annotations

import importlib


def available() -> tuple[bool, str]:
    """Whether the kernels can run here, and the instruction set they use or the reason why not."""
    try:
        module = importlib.import_module("native._native")
    except ImportError as error:
        return False, f"the extension is not built ({error})"
    try:
        return True, str(module.choose_isa())
    except ValueError as error:
        return False, str(error)
