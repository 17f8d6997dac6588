"""Projections whose weights lie in tiles, joined and alone, in steps of one to many rows, against float64."""

from __future__ import annotations

import pytest
import torch

from engine.linear import gpu_weights
from engine.linear.gpu import GpuLinearBackend
from engine.weights.tiled.layout import has_tiles
from engine.weights.tiled.packer import Packer
from native import _native
from tests.native.blocks import QUANTISED
from tests.native.expert_layers import BF16, F32, tensor

GPU = torch.cuda.is_available()
DTYPE = BF16 if GPU else F32  # the interpreter has no bf16
TILED = [kind for kind in QUANTISED if has_tiles(_native.format_of(kind))]
KINDS = TILED if GPU else ["Q4_0", "Q6_K", "MXFP4", "F8_E4M3"]  # the interpreter is slow
NARROW = ["Q4_1", "Q5_0", "IQ4_NL", "MXFP4", "INT4_G32"]
SHAPES = [*((kind, 512) for kind in KINDS), *((kind, 160) for kind in (NARROW if GPU else NARROW[2:4]))]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 20, 100, 300])
@pytest.mark.parametrize("kind,inner", SHAPES)
def test_right_alone_and_joined(
    kind: str, inner: int, rows: int, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 + 64 columns of one format, then 50 of another. 300 rows meet numbers, 100 blocks of 64 as of a matrix that
    is too large for that. 160 is no multiple of a tile."""
    if rows == 100:
        monkeypatch.setattr(gpu_weights, "TABLE_BYTES", 0)
    backend = GpuLinearBackend(DTYPE, kernel_device, 2, 16, None, Packer(kernel_device))
    made = [tensor(k, k, n, inner, n, experts=1) for k, n in ((kind, 128), (kind, 64), ("Q8_0", 50))]
    linears = [backend.load(f"p{i}", weight[0], None) for i, (weight, _) in enumerate(made)]
    assert all(linear.product.weights.dense is None for linear in linears)
    x = torch.randn(rows, inner, generator=torch.Generator().manual_seed(1)).to(DTYPE)
    want = [x.double() @ values[0].double().T for _, values in made]
    alone = [linear(x.to(kernel_device), None) for linear in linears]
    together = backend.join(linears)(x.to(kernel_device), None)
    first = 7  # rows from the middle of a matrix on
    for linear, (_, values) in zip(linears, made, strict=True):
        rest = linear.numbers(first, linear.shape[0] - first)
        assert torch.equal(rest.cpu(), values[0][first:].to(DTYPE))
    for outs in (alone, together):
        for out, expected in zip(outs, want, strict=True):
            assert out.shape == expected.shape
            error = (out.cpu().double() - expected).abs().mean() / expected.abs().mean()
            assert float(error) < (0.01 if GPU else 3e-6)  # one row: in int8; more: scales and weights in bf16


@pytest.mark.gpu
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", TILED)
def test_an_embedding_has_the_file_s_values(kind: str, tied: bool, kernel_device: torch.device) -> None:
    backend = GpuLinearBackend(DTYPE, kernel_device, 2, 16, None, Packer(kernel_device))
    weight, values = tensor(kind, "embed", 60, 256, 7, experts=1)
    head = backend.load("head", weight[0], None) if tied else None
    made = backend.embedding("embed", weight[0], head)
    assert made is not None and made.device == torch.empty(0, device=kernel_device).device  # with its index
    ids = torch.tensor([59, 0, 3, 3, 17], device=kernel_device)
    got, want = made(ids).cpu(), values[0][ids.cpu()].to(DTYPE)
    assert got.dtype == DTYPE
    torch.testing.assert_close(got, want, rtol=2**-7 if GPU else 1e-5, atol=1e-6)  # at most rounded to a neighbour
    assert made(ids[:0]).shape == (0, 256)
    assert (made.num_bytes == 0) == tied


@pytest.mark.gpu
def test_an_embedding_without_a_form_is_a_table(kernel_device: torch.device) -> None:
    backend = GpuLinearBackend(DTYPE, kernel_device, 2, 16, "int8", Packer(kernel_device))
    for kind in ("Q2_K", "BF16"):
        weight, _ = tensor(kind, "embed", 32, 256, 7, experts=1)
        assert backend.embedding("embed", weight[0], None) is None
