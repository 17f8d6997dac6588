"""The instruction sets of this machine, oldest first: each test of a kernel runs on all of them."""

from native import _native

_ALL = ("avx2", "avx512", "amx")
ISAS = _ALL[: _ALL.index(_native.best_isa()) + 1]
