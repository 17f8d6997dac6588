"""The sums over experts' rows that LoRA's gradients are, against torch's own products."""

from __future__ import annotations

import pytest
import torch

from training.experts.streamed import products


@pytest.mark.gpu
@pytest.mark.parametrize("m,n", [(32, 96), (160, 16), (16, 64)])
def test_sums_of_rows(kernel_device: torch.device, m: int, n: int) -> None:
    from training.experts.streamed import kernels  # needs Triton

    torch.manual_seed(0)
    counts = torch.tensor([0, 1, 70, 0, 64, 5, 0])
    start = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    wide = torch.randn(int(counts.sum()), 2 * m)
    a, b = wide[:, m:], torch.randn(len(wide), n)  # rows that do not lie behind one another
    dtypes = (torch.float32, torch.bfloat16) if kernel_device.type == "cuda" else (torch.float32,)
    for dtype in dtypes:
        left, right = a.to(dtype), b.to(dtype)
        want = products.outer(left, right, start, 0.5)
        there = wide.to(kernel_device, dtype)[:, m:]
        got = kernels.outer(there, right.to(kernel_device), start.to(kernel_device), 0.5)
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-4)
        assert not got.cpu()[counts == 0].any()
