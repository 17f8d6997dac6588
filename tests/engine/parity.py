"""What tests of equal tokens share: the ways to compute, random prompts, when two tokens are as good, and requests that
are preempted.

`BACKENDS`: plain torch, and what this machine gets by default (the native kernels, where they are built) on each of
its instruction sets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from testing.harness import Harness, greedy
from tests.native.isas import ISAS

SETTINGS = [{"rules": "reference"}, *({"rules": None, "isa": isa} for isa in ISAS or [None])]
BACKENDS = pytest.mark.parametrize("backend", SETTINGS, ids=lambda b: b["rules"] or f"native-{b['isa']}")
CLEAR = 1e-3  # a smaller gap between the best two tokens is a tie that rounding may break either way


def prompts(seed: int, lengths: list[int], vocabulary: int = 128) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocabulary, (n,), generator=g).tolist() for n in lengths]


def expect_preempted(model: torch.nn.Module, folder: Path, **config: Any) -> None:
    """In a cache far too small for all at once requests are preempted and recomputed, and their tokens are the
    model's."""
    asked = prompts(3, [20, 25, 30, 35])
    engine = Harness(folder, kv_cache_tokens=96, max_model_len=80, max_num_seqs=4, **config)
    got = engine.generate(asked, max_tokens=24)
    assert engine.core.scheduler.stats()["preemptions"] > 0
    for prompt, tokens in zip(asked, got, strict=True):
        expected, gap = greedy(model, prompt, 24, tokens)
        assert tokens == expected or gap < CLEAR
    engine.close()
