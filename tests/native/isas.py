"""The instruction sets of this machine, oldest first: each test of a kernel runs on all of them."""

from __future__ import annotations

import importlib

from native import available

_ALL = ("avx2", "avx512", "amx")
_BEST = importlib.import_module("native._native").best_isa() if available()[0] else None
ISAS: tuple[str, ...] = _ALL[: _ALL.index(_BEST) + 1] if _BEST else ()  # none where the kernels are not built
