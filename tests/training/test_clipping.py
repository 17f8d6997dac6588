"""Gradients are clipped as torch clips them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from training.loop.clipping import clip


@pytest.mark.parametrize("most", [0.5, 1e4, math.inf])
def test_as_torch_does(most: float) -> None:
    shapes = [(4, 3, 16), (7, 5), (9,), (2, 2, 2, 8), (3, 3)]
    ours, theirs = ([nn.Parameter(torch.zeros(shape)) for shape in shapes] for _ in range(2))
    torch.manual_seed(0)
    for mine, other in list(zip(ours, theirs, strict=True))[:-1]:  # the last one has no gradient
        mine.grad = torch.randn(mine.shape)
        other.grad = mine.grad.clone()
    got, want = clip(ours, most), nn.utils.clip_grad_norm_(theirs, most)
    torch.testing.assert_close(got, want)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    assert not clip(ours[-1:], most)
