"""bf16: the engine's error against float32 is at most 1.25 times that of transformers itself in bf16: in every family,
at every mix and on every backend."""

from __future__ import annotations

import pytest

from benchmarks.accuracy.table import MIXES, Files, measure, measure_apart
from engine.experts.kt.process import kt_available
from testing.models.tiny import FAMILIES
from tests.engine.parity import SETTINGS


@pytest.fixture(scope="module", params=FAMILIES)
def files(request, tmp_path_factory) -> list[Files]:
    folder, seeds = tmp_path_factory.mktemp("models"), (0, 1, 2) if request.param == "qwen3_moe" else (0, 1)
    return [Files(folder, "BF16", seed, family=request.param) for seed in seeds]


@pytest.mark.parametrize("mix", MIXES)
def test_error_is_bounded(files, mix):
    """With the activations' dtype that `auto` chooses."""
    check(files, mix, dtype="auto", **backend_of(files, mix))


@pytest.mark.parametrize("own", [True, False], ids=["own", "another"])
def test_error_is_bounded_where_all_is_bfloat16(files, own):
    """On this machine's own kernels, and on one of the other backends, which all meet two families or more."""
    backend = SETTINGS[-1] if own else SETTINGS[family_of(files) % (len(SETTINGS) - 1)]
    check(files, "preempted", dtype="bfloat16", **backend)  # long prompts, decode, and computing both again


def family_of(files: list[Files]) -> int:
    return list(FAMILIES).index(files[0].float32.config.model_type)


def backend_of(files: list[Files], mix: str) -> dict[str, str | None]:
    """One for each pair of a family and a mix, so that each backend meets each family and each mix: what differs is
    the backend's sums, which do not depend on the mix, or the mix's rows, which all backends take from one runner."""
    return SETTINGS[(family_of(files) + MIXES.index(mix)) % len(SETTINGS)]


def check(files: list[Files], mix: str, **config: str | None) -> None:
    runs = [measure(f, mix, seed, **config) for seed, f in enumerate(files)]
    assert sum(r.positions for r in runs) > 50
    error, theirs = sum(r.error for r in runs), sum(r.transformers for r in runs)
    assert error <= 1.25 * theirs, f"{error / theirs:.2f} times transformers' error"


def test_error_of_padded_greedy_steps_is_bounded(files):
    """Their logits stay in the buffers of the graphs."""
    runs = [measure(f, "decode", seed, cuda_graphs="padded", rules="reference") for seed, f in enumerate(files)]
    error, theirs = sum(r.error for r in runs), sum(r.transformers for r in runs)
    assert error <= 1.25 * theirs, f"{error / theirs:.2f} times transformers' error"


@pytest.mark.skipif(not kt_available()[0], reason="kt_kernel cannot run here; tests/kt fails where it should")
@pytest.mark.parametrize("mix", ["chunked prefill"])  # docs/accuracy.md has all of them
def test_error_is_bounded_on_kt(mix):
    runs = [measure_apart("BF16", mix, seed, {"rules": "cpu-kt"}) for seed in range(3)]
    error, theirs = sum(r.error for r in runs), sum(r.transformers for r in runs)
    assert error <= 1.25 * theirs, f"{error / theirs:.2f} times transformers' error"
