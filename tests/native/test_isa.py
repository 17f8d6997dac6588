"""KTSERVE_ISA chooses the kernels where no argument does; shown by the bits that come out."""

from __future__ import annotations

import hashlib

import pytest
import torch

from engine.attention.base import BatchLayout
from engine.attention.native import NativeAttention
from engine.linear.native import NativeLinearBackend
from engine.weights.store import WeightTensor
from native import _native
from testing.models.shapes import config
from tests.native.isas import ISAS


def digest(isa: str) -> str:
    """What experts' kernels say that they are, and the bits of an attention step and a projection: where tiles are
    multiplied, and on AMD by AVX-512, they are others."""
    pool = _native.WorkerPool([[0]])
    random = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).bfloat16()

    attention = NativeAttention(config().layers[0].attention, [0, 1], 4, torch.bfloat16, pool, isa)
    empty = torch.zeros(0, dtype=torch.int64)
    attention.plan(BatchLayout([0, 40], [40], [(0, 1, 2)], empty, empty))
    attended = attention.forward(0, draw(40, 4, 32), draw(40, 2, 32), draw(40, 2, 32))
    weight = WeightTensor("w", (48, 256), "BF16", draw(48, 256).view(torch.uint8).numpy().ravel())
    projected = NativeLinearBackend(torch.bfloat16, pool, isa).load("w", weight, None)(draw(40, 256), None)
    both = torch.cat([attended.flatten(), projected.flatten()])
    return f"{_native.MoeRunner(pool, isa).isa} {hashlib.sha256(both.view(torch.uint8).numpy().tobytes()).hexdigest()}"


@pytest.mark.parametrize("isa", ISAS)
def test_the_environment_chooses(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTSERVE_ISA", isa)
    assert digest("") == digest(isa) and digest("").startswith(f"{isa} ")


@pytest.mark.skipif("amx" not in ISAS, reason="needs AMX")
def test_tiles_can_be_told_by_their_bits() -> None:
    assert digest("amx").split()[1] != digest("avx512").split()[1]


def test_names_that_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTSERVE_ISA", "sse")
    with pytest.raises(ValueError, match="'sse'; allowed are avx2, avx512, amx"):
        _native.choose_isa("")
    assert _native.choose_isa("avx2") == "avx2"
