"""Projections whose weights lie in tiles, joined and alone, in steps of one to many rows, against float64."""

from __future__ import annotations

import pytest
import torch

from engine.linear.gpu import GpuLinearBackend
from engine.weights.tiled.convert import Packer
from engine.weights.tiled.layout import has_tiles
from native import _native
from tests.native.blocks import QUANTISED
from tests.native.expert_layers import BF16, F32, tensor

GPU = torch.cuda.is_available()
DTYPE = BF16 if GPU else F32  # the interpreter has no bf16
KINDS = [kind for kind in QUANTISED if has_tiles(_native.format_of(kind))] if GPU else ["Q4_0", "Q6_K"]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 20, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_right_alone_and_joined(kind: str, rows: int, kernel_device: torch.device) -> None:
    """128 + 64 columns of one format, then 50 of another."""
    backend = GpuLinearBackend(DTYPE, kernel_device, 2, 16, None, Packer(kernel_device))
    made = [tensor(k, k, n, 512, n, experts=1) for k, n in ((kind, 128), (kind, 64), ("Q8_0", 50))]
    linears = [backend.load(f"p{i}", weight[0], None) for i, (weight, _) in enumerate(made)]
    assert all(linear.product.weights.dense is None for linear in linears)
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(1)).to(DTYPE)
    want = [x.double() @ values[0].double().T for _, values in made]
    alone = [linear(x.to(kernel_device), None) for linear in linears]
    together = backend.join(linears)(x.to(kernel_device), None)
    for outs in (alone, together):
        for out, expected in zip(outs, want, strict=True):
            assert out.shape == expected.shape
            error = (out.cpu().double() - expected).abs().mean() / expected.abs().mean()
            assert float(error) < (0.01 if GPU else 3e-6)  # one row: in int8; more: scales and weights in bf16
