"""bf16: the engine's error against float32 is at most 1.25 times that of transformers itself in bf16, at every mix."""

from __future__ import annotations

import pytest

from benchmarks.accuracy import MIXES, Files, measure


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[Files]:
    folder = tmp_path_factory.mktemp("models")
    return [Files(folder, "BF16", seed) for seed in (0, 1, 2)]


@pytest.mark.parametrize("rules", ["reference", None])
@pytest.mark.parametrize("mix", MIXES)
def test_error_is_bounded(files, rules, mix):
    runs = [measure(f, mix, seed, rules=rules) for seed, f in enumerate(files)]
    assert sum(r.positions for r in runs) > 50
    error, theirs = sum(r.error for r in runs), sum(r.transformers for r in runs)
    assert error <= 1.25 * theirs, f"{error / theirs:.2f} times transformers' error"
