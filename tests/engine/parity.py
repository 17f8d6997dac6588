"""What tests of equal tokens share: the ways to compute, random prompts, and when two tokens are as good.

`BACKENDS`: plain torch, and what this machine gets by default (the native kernels, where they are built) on each of
its instruction sets.
"""

from __future__ import annotations

import pytest
import torch

from tests.native.isas import ISAS

SETTINGS = [{"rules": "reference"}, *({"rules": None, "isa": isa} for isa in ISAS or [None])]
BACKENDS = pytest.mark.parametrize("backend", SETTINGS, ids=lambda b: b["rules"] or f"native-{b['isa']}")
CLEAR = 1e-3  # a smaller gap between the best two tokens is a tie that rounding may break either way


def prompts(seed: int, lengths: list[int], vocabulary: int = 128) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocabulary, (n,), generator=g).tolist() for n in lengths]
