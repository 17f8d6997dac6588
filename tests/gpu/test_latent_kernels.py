"""Adapters of latent attention's kv_b by segments against plain torch."""

from __future__ import annotations

import pytest
import torch

from engine.linear.base import LoraBatch
from engine.linear.gpu import GpuLatentUp
from engine.linear.latent import TorchLatentUp
from engine.linear.segments import Groups, Segments
from engine.lora.adapter import LoraPair

pytestmark = pytest.mark.gpu


def batch(slots: list[int], device: torch.device, extra_tiles: int = 0) -> LoraBatch:
    """`extra_tiles`: unused ones behind those that count, as in a graph."""
    groups = Groups.of(torch.tensor(slots).numpy())
    tiles = torch.tensor(groups.tiles, dtype=torch.int32).view(-1, 3)
    tiles = torch.cat((tiles, torch.zeros(extra_tiles, 3, dtype=torch.int32))).to(device)
    order = torch.zeros(len(slots), dtype=torch.int32)
    order[: len(groups.order)] = torch.tensor(groups.order)
    held = torch.tensor(slots, dtype=torch.int32, device=device)
    return LoraBatch(held, groups.tokens(device), Segments(order.to(device), tiles))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "nope", "value", "rank"), [(3, 32, 48, 64), (2, 128, 128, 512), (2, 40, 24, 72)])
def test_projections_by_heads(kernel_device, dtype, heads, nope, value, rank) -> None:
    """Slot 3 has no adapter; all are emptied again."""
    if kernel_device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bf16 as if it were whole numbers")
    g = torch.Generator().manual_seed(heads * rank)

    def normal(*size: int) -> torch.Tensor:
        return (torch.randn(size, generator=g) / size[-1] ** 0.5).to(kernel_device, dtype)

    weight = normal(heads * (nope + value), rank)
    ours = GpuLatentUp("kv_b", weight, heads, nope, 4, 64)
    theirs = TorchLatentUp(weight.float().view(heads, -1, rank), nope)
    for slot, r in ((1, 3), (2, 16), (4, 40)):
        pair = LoraPair(normal(r, rank).cpu(), normal(heads * (nope + value), r).cpu(), 0.5 * slot)
        ours.set_adapter(slot, pair)
        theirs.set_adapter(slot, LoraPair(pair.a.float(), pair.b.float(), pair.scale))
    q, mixed = normal(40, heads, nope + 8)[..., :nope] * 8, normal(40, heads, rank) * 8
    limit = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    for slots in ([0] * 40, [1] * 33 + [0] * 7, [0, 1, 2, 3, 4, 2, 1, 1] * 5):
        lora = batch(slots, kernel_device, extra_tiles=2)
        for got, want in (
            (ours.absorb(q, lora), theirs.absorb(q.float(), lora)),
            (ours.values(mixed, lora), theirs.values(mixed.float(), lora)),
        ):
            torch.testing.assert_close(got.float(), want, **limit)
    plain = LoraBatch(lora.slots, lora.groups)
    torch.testing.assert_close(ours.values(mixed, plain).float(), ours.values(mixed, lora).float(), **limit)
    latents = normal(9, rank)
    for got, want in zip(ours.expand(latents, 2), theirs.expand(latents.float(), 2), strict=True):
        torch.testing.assert_close(got.float(), want, **limit)
    for slot in (1, 2, 4):
        ours.set_adapter(slot, None)
    assert torch.equal(ours.absorb(q, lora), ours.absorb(q, None))


def test_what_a_graph_is_given_is_not_looked_at_on_the_host(kernel_device) -> None:
    """No groups, as while a graph is captured: segments say it all."""
    weight, g = torch.randn(2 * 64, 64, device=kernel_device), torch.Generator().manual_seed(0)
    up = GpuLatentUp("kv_b", weight, 2, 32, 2, 16)
    assert up.captures
    up.set_adapter(1, LoraPair(torch.randn(4, 64, generator=g), torch.randn(2 * 64, 4, generator=g), 1.0))
    lora, q = batch([0, 1, 1], kernel_device), torch.randn(3, 2, 32, device=kernel_device)
    assert torch.equal(up.absorb(q, LoraBatch(lora.slots, [], lora.segments)), up.absorb(q, lora))
